"""The timeline in a headless Chromium: first picture, zoom and pan, requests, and the server's memory, at more and more ops.

    python tools/bench/bench_dashboard.py [--ops N]… [--dp N] [--keep DIR] [--browsers N]

The tables are those of bench_tables.py: 1F1B of 8 stages and 64 microbatches on 8 × DP ranks. The server is `pptrace dashboard`
in a process of its own. *First picture*: from opening the address to the last bar, on a server that has loaded the run. *Moves*:
60 zooms and pans from a step on, and 60 from the whole run with an open group; *drawn* is until the next frame shows the new
view, with what is there already, *complete* until all its tiles have come. With ``--browsers`` as many,
each a process of its own, open one server's timeline at once and then all move at once; *answers* are those of the server to
their requests while they move.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.bench_tables import DP as DP_OF_TABLES
from tools.bench.bench_tables import OPS_PER_STEP, write_tables
from tools.get_browser import find_browser

FIRST_S, DRAWN_MS, SERVER_BYTES = 2.0, 50.0, 1.5e9
LOAD_S = 3_600
NUM_MOVES = 60
DRAWN = "#timeline[data-complete=true]"

MOVE = """async ([kind, amount]) => {
    const timeline = document.querySelector('#timeline').timeline;
    const began = performance.now();
    if (kind === 'zoom') timeline.zoom(amount); else timeline.move(amount);
    await new Promise(done => requestAnimationFrame(() => {
        const channel = new MessageChannel();
        channel.port1.onmessage = done;
        channel.port2.postMessage(0);
    }));
    const drawn = performance.now() - began;
    while (document.querySelector('#timeline').dataset.complete !== 'true') await new Promise(done => setTimeout(done, 4));
    return [drawn, performance.now() - began];
}"""


WHOLE_RUN = """() => {
    const timeline = document.querySelector('#timeline').timeline;
    if (!timeline.isOpen(0)) timeline.toggleGroup(0);
    timeline.show(0, timeline.about.span);
}"""


def server_of(folder: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "pptrace", "dashboard", str(folder), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    return process, process.stdout.readline().split(" at ")[1].split()[0]


def memory_of(pid: int) -> int:
    """Resident bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024


def moves(rng: np.random.Generator) -> list[tuple[str, float]]:
    """Zooms in and out by a half to two, and pans by up to 30 % of the view."""
    return [
        ("zoom", float(np.exp(rng.uniform(-0.7, 0.7))))
        if rng.random() < 0.5
        else ("pan", float(rng.uniform(-0.3, 0.3)))
        for _ in range(NUM_MOVES)
    ]


def p95(values: list[float]) -> float:
    return float(np.percentile(values, 95))


def measure(page: Any, url: str) -> dict[str, float]:
    page.set_default_timeout(LOAD_S * 1000)
    began = time.perf_counter()
    page.goto(url + "timeline")
    page.wait_for_selector(DRAWN)
    loaded = time.perf_counter() - began
    page.goto("about:blank")
    weight: list[int] = []
    page.on("response", lambda answer: weight.append(int(answer.headers.get("content-length", 0))))
    began = time.perf_counter()
    page.goto(url + "timeline")
    page.wait_for_selector(DRAWN)
    first = time.perf_counter() - began
    at_first = sum(weight)
    rng = np.random.default_rng(1)
    times = [page.evaluate(MOVE, list(move)) for move in moves(rng)]
    page.evaluate(WHOLE_RUN)
    page.wait_for_timeout(100)
    page.wait_for_selector(DRAWN)
    times += [page.evaluate(MOVE, list(move)) for move in moves(rng)]
    return {
        "load_s": loaded,
        "first_s": first,
        "weight": at_first,
        "drawn_ms": p95([drawn for drawn, _ in times]),
        "complete_ms": p95([complete for _, complete in times]),
    }


ANSWERS = """() => {
    const answers = performance.getEntriesByType('resource').filter(entry => entry.initiatorType === 'fetch');
    return answers.map(entry => entry.responseEnd - entry.requestStart);
}"""


async def measure_together(url: str, num_browsers: int, chromium: str) -> dict[str, float]:
    """p95 over all browsers of the first picture, of moves, and of the server's answers while they move."""
    from playwright.async_api import async_playwright

    async def first_picture(page: Any) -> float:
        began = time.perf_counter()
        await page.goto(url + "timeline")
        await page.wait_for_selector(DRAWN)
        return time.perf_counter() - began

    async def move_about(page: Any, seed: int) -> tuple[list[list[float]], list[float]]:
        await page.evaluate("performance.setResourceTimingBufferSize(5000)")
        await page.evaluate("performance.clearResourceTimings()")
        times = [await page.evaluate(MOVE, list(move)) for move in moves(np.random.default_rng(seed))]
        return times, await page.evaluate(ANSWERS)

    async with async_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu"]
        launched = [playwright.chromium.launch(executable_path=chromium, args=args) for _ in range(num_browsers)]
        browsers = await asyncio.gather(*launched)
        pages = [await browser.new_page(viewport={"width": 1280, "height": 800}) for browser in browsers]
        for page in pages:
            page.set_default_timeout(LOAD_S * 1000)
        await first_picture(pages[0])  # the run is loaded
        await pages[0].goto("about:blank")
        firsts = await asyncio.gather(*map(first_picture, pages))
        moved = await asyncio.gather(*(move_about(page, seed) for seed, page in enumerate(pages)))
        for browser in browsers:
            await browser.close()
    times = [time for of_page, _ in moved for time in of_page]
    return {
        "first_s": p95(list(firsts)),
        "drawn_ms": p95([drawn for drawn, _ in times]),
        "complete_ms": p95([complete for _, complete in times]),
        "answer_ms": p95([answer for _, answers in moved for answer in answers]),
    }


def run_together(folder: Path, num_ops: int, num_browsers: int) -> None:
    """Measure one run with several browsers and print its line."""
    process, url = server_of(folder)
    load = os.getloadavg()[0]
    try:
        figures = asyncio.run(measure_together(url, num_browsers, str(find_browser())))
        memory = memory_of(process.pid)
    finally:
        process.kill()
        process.wait()
    print(
        f"{num_ops:>12,} ops, {num_browsers} browsers at once: p95 of the first picture {figures['first_s']:.2f} s; of a move "
        f"{figures['drawn_ms']:.0f} ms drawn, {figures['complete_ms']:.0f} ms complete; of the server's answers "
        f"{figures['answer_ms']:.0f} ms; server {memory / 1e6:,.0f} MB; load {load:.0f}, at the end {os.getloadavg()[0]:.0f}",
        flush=True,
    )


def run(folder: Path, num_ops: int, dp: int) -> bool:
    """Measure one run and print its line; whether it keeps the limits."""
    from playwright.sync_api import sync_playwright

    chromium = str(find_browser())
    process, url = server_of(folder)
    complaints: list[str] = []
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            figures = measure(page, url)
            browser.close()
        memory = memory_of(process.pid)
    finally:
        process.kill()
        process.wait()
    is_good = (
        figures["first_s"] < FIRST_S and figures["drawn_ms"] < DRAWN_MS and memory < SERVER_BYTES and not complaints
    )
    print(
        f"{num_ops:>12,} ops on {8 * dp:,} ranks: loaded in {figures['load_s']:.1f} s; "
        f"first picture {figures['first_s']:.2f} s, {figures['weight'] / 1e6:.1f} MB; "
        f"p95 of a move {figures['drawn_ms']:.0f} ms drawn, {figures['complete_ms']:.0f} ms complete; "
        f"server {memory / 1e6:,.0f} MB; {len(complaints)} console errors{'' if is_good else '   BEYOND LIMITS'}",
        flush=True,
    )
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=float, action="append", help="about so many ops (default: 10^5 and 10^6)")
    parser.add_argument("--dp", type=int, default=DP_OF_TABLES, help="pipelines of 8 ranks")
    parser.add_argument("--keep", type=Path, help="write the tables here and keep them; those that are here are taken")
    parser.add_argument("--browsers", type=int, default=1, help="browsers at once")
    options = parser.parse_args()
    is_good = True
    for wanted in options.ops or [1e5, 1e6]:
        num_steps = max(round(wanted / (OPS_PER_STEP // DP_OF_TABLES * options.dp)), 1)
        num_ops = num_steps * OPS_PER_STEP // DP_OF_TABLES * options.dp
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "ops.parquet").is_file():
                write_tables(folder, num_steps, messages=True, dp=options.dp)
            if options.browsers > 1:
                run_together(folder, num_ops, options.browsers)
            else:
                is_good &= run(folder, num_ops, options.dp)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
