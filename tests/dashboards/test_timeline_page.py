"""The timeline as a person uses it: in a real headless Chromium."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from pptrace.report.tiles.details import title_of
from pptrace.report.tiles.timeline import Timeline
from pptrace.schedule.registry import build
from pptrace.simulator import simulate, uniform
from pptrace.workflow.load import load
from tests.dashboards.accessibility import violations
from tests.dashboards.canvas import STATE, difference, drawn, opened_anew, picture, texts_of
from tests.dashboards.conftest import Serve, Visit, Visiting, visiting
from tests.dashboards.synthetic import write_run
from tests.support.kineto import event_row, write_rows
from tests.support.programs import SAMPLES

pytestmark = pytest.mark.browser


def view(page: Any) -> list[float]:
    """The range of time that is shown, ns."""
    return page.evaluate(f"[{STATE}.t0, {STATE}.t1]")


def place_of(page: Any, kind: str, microbatch: int, rank: int) -> list[float]:
    """The middle of an op on the screen, px."""
    return page.evaluate(
        """([kind, microbatch, rank]) => {
            const timeline = document.querySelector('#timeline').timeline;
            const frame = timeline.canvas.getBoundingClientRect();
            for (const part of timeline.drawn) {
                const ops = part.sections.ops;
                for (let bar = 0; part.placeOf && bar < ops.start.length; bar += 1) {
                    const at = ops.rank[ops.track[bar]];
                    const isIt = part.texts.kind[ops.kind[bar]] === kind && ops.microbatch[bar] === microbatch;
                    if (!isIt || timeline.about.ranks[at].rank !== rank || ops.start[bar] > timeline.t1) continue;
                    const spot = part.placeOf('ops', at, 0, 0);
                    if (!spot) continue;
                    const x = timeline.x(ops.start[bar] + ops.length[bar] / 2 + part.shift);
                    return [frame.left + x * timeline.scale, frame.top + (spot[0] + spot[1] / 2) * timeline.scale];
                }
            }
        }""",
        [kind, microbatch, rank],
    )


def address(page: Any) -> str:
    """The address when it has followed the view."""
    page.wait_for_timeout(200)
    return str(page.url)


GO = """address => {
    document.activeElement.blur();
    history.pushState({}, "", address);
    dispatchEvent(new PopStateEvent("popstate"));
}"""


@pytest.fixture(scope="module")
def window(browser: Any, serve: Serve, run_p4: Path) -> Iterator[Visit]:
    with visiting(browser) as open_page:
        yield open_page(serve([run_p4]) + "hang")


@pytest.fixture
def timeline(window: Visit, serve: Serve, run_p4: Path) -> Iterator[Any]:
    """A timeline at step 2. The page around it is the same for all tests: to load it takes longer than most of them."""
    home, page = serve([run_p4]), window.page
    page.bring_to_front()
    if not page.url.startswith(home):
        page.goto(home + "hang")
    page.mouse.move(0, 0)
    page.set_viewport_size({"width": 1400, "height": 900})
    page.evaluate(GO, "/hang")
    page.wait_for_selector("#no-hang")
    page.evaluate(GO, "/timeline?step=2")
    yield drawn(page)
    # The next test may serve another run, and no tile of this one may be asked for then.
    page.wait_for_function("() => !document.querySelector('#timeline')?.timeline?.tiles.isWaiting")
    assert window.complaints == []


def test_pointing_and_clicking_tell_of_an_op_and_its_microbatch(timeline: Any) -> None:
    timeline.mouse.move(*place_of(timeline, "F", 2, 0))
    timeline.wait_for_function("() => document.querySelector('.timeline-tip').textContent.includes('phase')")
    tip = timeline.inner_text(".timeline-tip")
    began = "10 ms"  # 4 + 0.4 + 5.2 + 0.4: rank 1 takes microbatch 1 when it has done with 0
    for part in ("Forward of microbatch 2", "4.00 ms", began, "warmup", "than in the plan"):
        assert part in tip
    timeline.mouse.click(*place_of(timeline, "F", 2, 0))
    timeline.wait_for_selector("#timeline-journey")
    hops = timeline.locator("#timeline-journey li")
    shown = [(hop.get_attribute("data-what"), int(hop.get_attribute("data-rank"))) for hop in hops.all()]
    down = [hop for stage in range(3) for hop in (("F", stage), ("send", stage), ("recv", stage + 1))]
    up = [hop for stage in (3, 2, 1) for hop in (("B", stage), ("send", stage), ("recv", stage - 1))]
    assert shown == [*down, ("F", 3), *up, ("B", 0)]
    late = {ms_of(hop.locator(".hop-late").text_content()): hop.get_attribute("data-what") for hop in hops.all()}
    in_picture = {
        ms_of(text) for text in texts_of(timeline.evaluate(f"{STATE}.svg()")) if text[:1] in "+−" and text[-1:] == "s"
    }
    assert {ms for ms, what in late.items() if what in "FB"} <= in_picture <= late.keys(), (
        "each op has its deviation there"
    )
    assert len(in_picture) > 0.8 * len(late), "and so have messages that leave room for it"
    lit = picture(timeline)
    link = address(timeline)
    assert "select=0.2.2" in link
    timeline.goto(link)
    timeline.wait_for_selector("#timeline-journey")
    assert difference(timeline, lit) == ""
    timeline.keyboard.press("Escape")
    assert timeline.locator("#timeline-journey:visible").count() == 0


def ms_of(text: str) -> float:
    """The number of a signed time, ms."""
    number, unit = text.replace("−", "-").split()
    return float(number) * {"ms": 1, "µs": 1e-3, "ns": 1e-6}[unit]


def test_a_wide_screen_has_larger_texts_and_answers_where_it_is_pointed_at(timeline: Any, serve: Serve) -> None:
    size = "getComputedStyle(document.querySelector('.facts')).fontSize"
    usual, rows = timeline.evaluate(size), timeline.evaluate(f"{STATE}.canvas.getBoundingClientRect().height")
    timeline.set_viewport_size({"width": 3840, "height": 2160})
    timeline.wait_for_function(f"() => {STATE}.scale > 1.5")
    drawn(timeline)
    assert float(timeline.evaluate(size)[:-2]) > 1.5 * float(usual[:-2])
    assert timeline.evaluate(f"{STATE}.canvas.getBoundingClientRect().height") > 1.5 * rows
    timeline.mouse.move(*place_of(timeline, "F", 2, 3))
    timeline.wait_for_function("() => document.querySelector('.timeline-tip').textContent.includes('microbatch 2')")
    assert timeline.evaluate("document.documentElement.scrollWidth") == 3840
    timeline.wait_for_load_state("networkidle")
    timeline.goto(timeline.url.partition("timeline")[0])
    bar = timeline.wait_for_selector("#rank-bars .barlayer .trace:first-child .point:last-child")
    box = bar.bounding_box()
    timeline.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.8)
    timeline.wait_for_selector("#rank-bars .hoverlayer .hovertext")
    assert "rank 3: " in timeline.text_content("#rank-bars .hoverlayer .hovertext"), "the row that is drawn lowest"


def test_wheel_drag_and_keys_move_the_view_and_a_link_restores_the_picture(timeline: Any) -> None:
    whole = view(timeline)
    box = timeline.locator(".timeline-canvas").bounding_box()
    x, y = box["x"] + 600, box["y"] + 120
    timeline.mouse.move(x, y)
    timeline.mouse.wheel(0, -500)
    drawn(timeline)
    near = view(timeline)
    assert whole[0] < near[0] < near[1] < whole[1]
    timeline.mouse.down()
    timeline.mouse.move(x - 100, y, steps=3)
    timeline.mouse.up()
    moved = view(timeline)
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    for key in ("w", "a", "1", "2", "c"):
        timeline.keyboard.press(key)
    closer = view(drawn(timeline))
    assert closer[1] - closer[0] == pytest.approx((moved[1] - moved[0]) / 1.4)
    timeline.wait_for_function(f"() => {STATE}.critical")
    assert timeline.evaluate(f"{STATE}.sources") == ["planned", "simulated", "measured"]
    before, link = picture(timeline), address(timeline)
    opened_anew(timeline, link).wait_for_function(f"() => {STATE}.critical")
    assert difference(timeline, before) == ""
    timeline.keyboard.press("f")
    timeline.keyboard.press("n")
    assert timeline.evaluate(f"{STATE}.step") == 3
    timeline.wait_for_function("() => document.querySelector('#step').textContent.includes('3')")
    per_pixel = (view(timeline)[1] - view(timeline)[0]) / timeline.evaluate(f"{STATE}.right - 168")
    timeline.keyboard.down("Shift")
    timeline.mouse.move(x, y)
    timeline.mouse.down()
    timeline.mouse.move(x + 80, y, steps=2)
    timeline.mouse.up()
    timeline.keyboard.up("Shift")
    first, last = timeline.evaluate(f"{STATE}.measured")
    assert last - first == pytest.approx(80 * per_pixel, abs=1)


def test_a_what_if_is_drawn_on_the_same_axis_with_its_own_legend_and_a_link_restores_it(timeline: Any) -> None:
    legend = timeline.inner_text(".timeline-legend")
    assert "warmup" in legend
    assert not any(words in legend for words in ("not launched", "Weight gradient")), "it has only what the run has"
    timeline.select_option("#timeline-whatif", "zb-h1")
    timeline.wait_for_function(f"() => {STATE}.sources.includes('whatif')")
    lit, link = picture(timeline), address(timeline)
    assert "whatif=schedule%3Dzb-h1" in link
    assert "Weight gradient" in timeline.inner_text(".timeline-legend")
    opened_anew(timeline, link)
    timeline.wait_for_function(f"() => document.querySelector('#timeline') && {STATE}.change")
    assert difference(timeline, lit) == ""
    timeline.keyboard.press("4")
    assert timeline.evaluate(f"{STATE}.sources") == ["measured"]
    timeline.evaluate(f"{STATE}.setChange('schedule=none')")
    timeline.wait_for_selector("#timeline-message:has-text('is not known')")


def test_a_search_goes_from_hit_to_hit(timeline: Any) -> None:
    timeline.keyboard.press("/")
    timeline.keyboard.type("rank 3 B 5")
    timeline.keyboard.press("Enter")
    timeline.wait_for_function("() => document.querySelector('#timeline-found').textContent === '1 of 3'")
    first = view(timeline)
    timeline.keyboard.press("Enter")
    timeline.wait_for_function("() => document.querySelector('#timeline-found').textContent === '2 of 3'")
    assert view(timeline)[0] > first[1]
    timeline.fill("#timeline-search", "nonsense")
    timeline.keyboard.press("Enter")
    timeline.wait_for_function(
        "() => document.querySelector('#timeline-found').textContent.includes('not known here: nonsense')"
    )


def test_many_ranks_are_groups_and_no_op_is_lost(tmp_path: Path, serve: Serve, visit: Visiting) -> None:
    """Thousands of ops of 20 ranks: groups open and close, and every op is a bar or counted in a cell."""
    ops = simulate(build("1f1b", 4, 64), uniform(1_000_000, 2_000_000)).ops()
    ops = ops[["rank", "kind", "stage", "microbatch", "start_ns", "end_ns"]]
    rows = pd.concat([ops.assign(rank=ops["rank"] + 4 * replica) for replica in range(20)])
    rows.to_csv(tmp_path / "ops.csv", index=False)
    page = drawn(visit(serve([tmp_path]) + "timeline").page)
    assert page.evaluate(f"{STATE}.rows.map(row => row.type)") == ["group"] * 4
    page.keyboard.press("g")
    drawn(page)
    assert page.evaluate(f"{STATE}.rows.length") == 20
    page.keyboard.press("g")
    drawn(page)
    box = page.locator(".timeline-canvas").bounding_box()
    page.mouse.click(box["x"] + 40, box["y"] + 55)
    page.keyboard.press("0")
    page.set_viewport_size({"width": 700, "height": 900})
    drawn(page)
    assert page.evaluate(f"{STATE}.rows.map(row => row.type).slice(0, 3)") == ["group", "rank", "rank"]
    sections = f"{STATE}.drawn.filter(part => part.type === 'tile').map(part => part.sections.ops)"
    counts = (
        f"{sections}.map(ops => [ops.count, ops.start.length - ops.earlier, ops.cellCount.reduce((a, b) => a + b, 0)])"
    )
    tiles = page.evaluate(counts)
    assert all(count == bars + cells for count, bars, cells in tiles)
    assert sum(count for count, _, _ in tiles) == 32 * len(ops) // 4, "a block of ranks"
    texts = {*texts_of(page.evaluate(f"{STATE}.svg()"))}
    assert {"rank 0", "rank 4", "step 0", "\u25b8 stage 1", "Forward", "fill"} <= texts


def test_keys_are_answered_where_the_link_was_clicked_and_escape_closes_what_lies_above_alone(timeline: Any) -> None:
    timeline.click("#to-steps")
    timeline.wait_for_selector("#steps-chart")
    timeline.click("#to-timeline")
    whole = view(drawn(timeline))
    timeline.keyboard.press("w")
    assert view(timeline)[0] > whole[0]
    timeline.keyboard.press("f")
    drawn(timeline)
    timeline.mouse.click(*place_of(timeline, "F", 2, 0))
    timeline.wait_for_selector("#timeline-journey")
    help_box = timeline.locator(".timeline-help")
    timeline.keyboard.press("?")
    assert help_box.is_visible()
    timeline.keyboard.press("Escape")
    assert help_box.is_hidden()
    assert timeline.locator("#timeline-journey").is_visible(), "only the keys were closed"
    timeline.keyboard.press("Escape")
    assert timeline.locator("#timeline-journey").count() == 0
    near = view(timeline)
    timeline.focus("#step")
    timeline.keyboard.press("w")
    assert view(timeline) == near, "the choice of steps has keys of its own"


def test_a_timeline_that_was_left_is_drawn_no_more(timeline: Any) -> None:
    timeline.evaluate(f"() => {{ {STATE}.draw = () => (window.isDrawnAgain = true); }}")
    timeline.click("#to-hang")
    timeline.wait_for_selector("#no-hang")
    timeline.emulate_media(color_scheme="dark")
    timeline.emulate_media(color_scheme="light")
    assert timeline.evaluate("() => window.isDrawnAgain") is None


def test_a_bar_in_several_tiles_is_drawn_once_and_below_it_no_gap_is_lost(visit: Visiting, serve: Serve) -> None:
    """Drawn twice a translucent bar is darker, and an op hides the gaps that its first tile has drawn in it."""
    page = drawn(visit(serve([SAMPLES / "gpu_1f1b_p4"]) + "timeline").page)
    crossing = page.evaluate(
        f"""{STATE}.drawn.flatMap(part => Object.values(part.sections).flatMap(section => section.track
            ? [...section.start].filter((start, bar) => start + section.length[bar] > part.time.end) : [])).length"""
    )
    assert crossing, "the view has several tiles"
    parts = list(ElementTree.fromstring(page.evaluate(f"{STATE}.svg()")).iter())
    wide = [rect for rect in parts if rect.get("x") and float(rect.get("width", "0")) > 2]
    drawings = Counter(tuple(sorted(rect.attrib.items())) for rect in wide)
    assert [attributes for attributes, times in drawings.items() if times > 1] == []
    gaps = [place for place, part in enumerate(parts) if part.get("fill") == "url(#hatch-not-launched)"]
    numbers = [place for place, part in enumerate(parts) if part.tag.endswith("text") and part.text == "0"]
    assert min(numbers) > max(gaps[:-2]), "numbers of microbatches are drawn above all but the legend"
    assert {"exposed transfer", "not launched", "unexplained"} <= {part.text for part in parts}


def test_names_of_a_trace_are_text(visit: Visiting, serve: Serve, run_p4: Path, browser: Any) -> None:
    hostile = "<img src=x onerror=\"document.title='attacked'\">"

    def attack(route: Any) -> None:
        answer = route.fetch()
        body = answer.json()
        if isinstance(body, dict) and "kindNames" in body:
            body["kindNames"]["F"] = hostile
            body["causes"] = [hostile, *body["causes"]]
        elif body and "what" in body[0]:
            body[0]["what"] = hostile
        elif body:
            body = [["", hostile], [hostile, hostile]]
        route.fulfill(response=answer, json=body)

    for name in ("about", "bar/**", "journey/**"):
        browser.route(f"**/timeline-data/{name}", attack)
    page = drawn(visit(serve([run_p4]) + "timeline").page)
    page.mouse.move(*place_of(page, "F", 2, 0))
    page.wait_for_function("() => document.querySelector('.timeline-tip').textContent.includes('img src=x')")
    page.mouse.click(*place_of(page, "F", 2, 0))
    page.wait_for_selector("#timeline-journey")
    for selector in (".timeline-tip", ".timeline-legend", "#timeline-journey"):
        assert hostile in page.inner_text(selector)
    drawing = ElementTree.fromstring(page.evaluate(f"{STATE}.svg()"))
    browser.unroute_all()
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert page.locator("#timeline img").count() == 0
    assert page.title() == "pptrace"


def test_bars_and_rows_stay_on_the_screen_ranks_are_aligned_and_a_link_restores_it(timeline: Any) -> None:
    """A pinned row is drawn at the top, kept details stay after Esc, and each rank is drawn where the chosen op begins."""
    timeline.mouse.move(*place_of(timeline, "F", 2, 3))
    timeline.wait_for_selector(".timeline-tip:visible")
    timeline.keyboard.press("r")
    pinned = timeline.evaluate(f"{STATE}.rows.map(row => [row.at, row.isPinned])")
    assert pinned == [[3, True], [0, False], [1, False], [2, False]]
    timeline.mouse.click(*place_of(timeline, "B", 4, 2))
    card = timeline.locator(".bar-card", has_text="Backward of microbatch 4")
    card.get_by_role("button", name="Keep").click()
    timeline.wait_for_selector(".card-number")
    timeline.keyboard.press("Escape")
    assert timeline.locator("#timeline-journey").count() == 0
    assert "8.00 ms" in card.inner_text()
    card.get_by_role("button", name="Align").click()
    timeline.wait_for_selector("#timeline-aligned:visible")
    drawn(timeline)
    pixels_per_ms = timeline.evaluate(f"({STATE}.right - {STATE}.left) / ({STATE}.t1 - {STATE}.t0) * 1e6")
    middles = [place_of(timeline, "B", 4, rank)[0] for rank in range(4)]
    longer = [middle - middles[0] for middle in middles]
    expected = [0, 0.3 * 8 / 2 * pixels_per_ms, 0, 0]  # stage 1 is 1.3 times as slow, and all begin together
    assert longer == pytest.approx(expected, abs=0.01)
    before, link = picture(timeline), address(timeline)
    opened_anew(timeline, link)
    assert difference(timeline, before) == ""
    assert "times of different ranks do not compare" in timeline.inner_text("#timeline-aligned")
    timeline.click("#timeline-unalign")
    assert timeline.locator("#timeline-aligned").is_hidden()
    assert "align=" not in address(timeline)
    timeline.mouse.click(
        timeline.locator(".timeline-canvas").bounding_box()["x"] + 40, place_of(timeline, "F", 2, 3)[1]
    )
    assert timeline.evaluate(f"{STATE}.pinHeight") == 0


def test_the_timeline_takes_the_room_that_is_left(visit: Visiting, serve: Serve, run_p4: Path) -> None:
    page = drawn(visit(serve([run_p4]) + "timeline?sources=planned,simulated,measured").page)
    height = page.evaluate(f"{STATE}.height")
    page.evaluate("document.querySelector('#opening').textContent = 'Reading 4 files'")
    assert page.locator("#opening").is_hidden(), "the page is there"
    page.evaluate(
        "document.querySelector('#facts').insertAdjacentHTML('beforebegin', '<p id=above style=height:160px>')"
    )
    page.wait_for_function(f"() => {STATE}.height < {height - 100}")
    page.evaluate("document.querySelector('#above').remove()")
    page.wait_for_function(f"() => {STATE}.height === {height}")
    page.evaluate("document.querySelector('#opening').textContent = ''")


def note(page: Any, words: str) -> None:
    """Search for words, when the page says how many bars it found."""
    page.fill("#timeline-search", words)
    page.keyboard.press("Enter")
    page.wait_for_selector("#timeline-found:has-text(' of ')")
    drawn(page)


def lanes_of(page: Any, rank: int) -> list[str]:
    """The lanes below the ops of a rank, as they are drawn."""
    return page.evaluate(f"{STATE}.rowOfRank.get({rank}).sources[0].lanes.slice(1).map(lane => lane.name)")


UNKNOWN_WORDS = """async () => {
    const { timeline } = document.querySelector('#timeline');
    const total = async ([q]) => {
        const query = new URLSearchParams({ q, events: '0' });
        return (await (await fetch(`/timeline-data/find/${timeline.about.token}?${query}`)).json()).total;
    };
    const entries = timeline.legendEntries();
    const totals = await Promise.all(entries.map(total));
    return entries.map(([text]) => text).filter((text, at) => !totals[at]);
}"""


def test_kernels_and_operators_open_below_a_rank_are_searched_and_summed(visit: Visiting, serve: Serve) -> None:
    """One page: lanes without bars take no room, names are found, and a range has sums that a link restores."""
    page = drawn(visit(serve([SAMPLES / "gpu_nccl_1f1b_p4"]) + "timeline?step=3&find=exposed+transfer+pp+step+3").page)
    assert page.inner_text("#timeline-found").startswith("1 of ")
    shown = page.evaluate(f"{STATE}.about.steps.find(step => step[0] === 3)")
    assert view(page)[0] < shown[1] < shown[2] < view(page)[1], "a link marks and shows the whole step"
    assert {"exposed transfer", "unexplained"} <= set(page.inner_text(".timeline-legend").split("\n"))
    plain = lanes_of(page, 1)
    page.evaluate(f"{STATE}.about.tables.comms.depthsOfRanks[1][0] = 0; {STATE}.redraw()")
    drawn(page)
    assert lanes_of(page, 1) == [name for name in plain if name != "receives"]
    x, y = place_of(page, "F", 0, 0)
    page.mouse.move(x, y)
    page.wait_for_selector(".timeline-tip:visible")
    for key in ("d", "ArrowDown", "w", "+", "Escape"):
        page.mouse.move(x, y)
        page.mouse.move(x, y + 1)
        page.evaluate(f"{STATE}.showTip({{ clientX: 300, clientY: 300 }}, [['', 'words']])")
        page.keyboard.press(key)
        assert page.locator(".timeline-tip").is_hidden(), key
    page.keyboard.press("f")
    drawn(page)
    page.mouse.move(*place_of(page, "F", 0, 0))
    page.keyboard.press("e")
    page.wait_for_function(f"() => {STATE}.lanesOfEvents.size === 1 && {STATE}.numReading === 0")
    drawn(page)
    assert {"stream 7", "stream 20"} <= set(lanes_of(page, 0))
    assert "stream 7" not in lanes_of(page, 1), "those of the rank under the pointer alone"
    drawing = page.evaluate(f"{STATE}.svg()")
    assert ">ncclDevKernel_SendRecv</text>" in drawing
    assert page.evaluate(UNKNOWN_WORDS) == [], "the legend's words are found"
    note(page, "fmha_cutlassF rank 0")
    table, at = page.evaluate(f"(() => {{ const [at, , , table] = {STATE}.found.bars[0]; return [table, at]; }})()")
    assert (table, at) == ("events", 0)
    first = view(page)
    page.keyboard.press("Enter")
    page.wait_for_function(f"() => {STATE}.found.index === 1")
    assert view(page) != first
    hit, link = page.evaluate(f"{STATE}.found.bars[1]"), address(page)
    opened_anew(page, link)
    assert page.evaluate(f"{STATE}.found.bars[{STATE}.found.index]") == hit, "a link goes to the hit that was shown"
    page.focus(".timeline-canvas")
    page.keyboard.press("f")
    drawn(page)
    box = page.locator(".timeline-canvas").bounding_box()
    middle = place_of(page, "F", 0, 0)[1]
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + 200, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 700, middle + 3, steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    page.wait_for_selector("#timeline-sums")
    sums = page.inner_text("#timeline-sums")
    for words in ("on rank 0", "Without compute in an op", "late message", "send (pp)", "Kernels and copies", "share"):
        assert words in sums
    assert violations(page) == []
    page.emulate_media(color_scheme="light")
    link = address(page)
    opened_anew(page, link)
    assert page.inner_text("#timeline-sums") == sums
    page.keyboard.press("Escape")
    assert page.locator("#timeline-sums").count() == 0
    page.click("#timeline-events")
    assert "stream 7" not in lanes_of(page, 0)


@pytest.fixture
def plain_run(tmp_path: Path) -> Path:
    """Two steps of one rank without a pipeline, of the same length: the second is the typical one."""
    events = []
    for step, begin in ((1, 1000.0), (2, 2000.0)):
        events += [
            event_row("user_annotation", f"ProfilerStep#{step}", begin, 900),
            event_row("cpu_op", "aten::linear", begin + 5, 400),
            event_row("cuda_runtime", "cudaLaunchKernel", begin + 10, 300, step),
            event_row("kernel", "void gemm<float>(float*)", begin + 30, 500, step, stream=7, device=0),
        ]
    return write_rows(tmp_path / "rank0.json", events, distributedInfo={"rank": 0, "world_size": 1}).parent


def test_the_timeline_begins_with_the_typical_step_before_the_header_knows_it(
    browser: Any, visit: Visiting, serve: Serve, plain_run: Path
) -> None:
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route) if "step.value" in (route.request.post_data or "") else route.continue_()

    browser.route("**/_dash-update-component*", hold)
    try:
        page = visit(serve([plain_run]) + "timeline").page
        page.bring_to_front()
        page.wait_for_selector("#timeline[data-complete]", state="attached")
        steps = page.evaluate(f"[{STATE}.step, {STATE}.about.steps[0][0]]")
        assert held, "the header answered first"
    finally:
        for route in held:
            route.continue_()
        browser.unroute("**/_dash-update-component*", hold)
    assert steps == [2, 1]
    page.wait_for_function("() => document.querySelector('#step').innerText.startsWith('2')")
    assert drawn(page).evaluate(f"{STATE}.step") == 2


def test_a_run_without_a_pipeline_has_its_kernels_and_operators_from_the_start(
    visit: Visiting, serve: Serve, plain_run: Path
) -> None:
    page = drawn(visit(serve([plain_run]) + "timeline").page)
    assert lanes_of(page, 0) == ["stream 7", "thread 1"]
    for name in ("gemm", "aten::linear", "cudaLaunchKernel", "ProfilerStep#2"):  # not short where its bar has room
        # Events come lane by lane.
        page.wait_for_function(f"() => {STATE}.svg().includes('>{name}</text>')", polling=100)
    assert "events=" not in address(page)
    assert "Compute, kernel" in page.inner_text(".timeline-legend").split("\n"), "they have one colour"
    colours = page.evaluate(
        f"[{STATE}.about.colours.memory, ...{STATE}.about.eventClasses.map(([, [[fill]]]) => fill)]"
    )
    assert len(set(colours)) == len(colours)
    page.keyboard.press("u")
    page.wait_for_selector("#timeline-sums:has-text('aten::linear')")


def test_the_whole_run_is_seen_above_the_rows_where_few_ranks_ever_compute_at_once(
    tmp_path: Path, visit: Visiting, serve: Serve
) -> None:
    page = drawn(visit(serve([write_run(tmp_path, "gpipe", pp=8, num_microbatches=1)]) + "timeline").page)
    painted = f"""() => {{
        const {{ mini }} = {STATE};
        const line = mini.getContext("2d").getImageData(mini.width / 4, mini.height / 3, mini.width / 2, 1).data;
        return line.some((value, at) => at % 4 === 3 && value);
    }}"""
    assert page.evaluate(painted)


TITLES = f"""() => {STATE}.drawn.filter(part => part.placeOf).flatMap(part => ["ops", "comms", "back"].flatMap(table => {{
    const section = part.sections[table];
    return [...section.start.keys()].map(bar => {{
        const track = section.track[bar];
        const hit = {{ part, table, section, bar, at: section.rank[track], lane: section.lane[track], start: 0, length: 0 }};
        return [part.source, table, section.row[bar], {STATE}.localLines(hit)[0][1]];
    }});
}}))"""


def test_titles_are_the_servers_before_it_answers(timeline: Any, run_p4: Path) -> None:
    timeline.evaluate(GO, "/hang")
    timeline.wait_for_selector("#no-hang")
    timeline.evaluate(GO, "/timeline?step=2&sources=planned,simulated,measured")
    found = drawn(timeline).evaluate(TITLES)
    expected = {(source, "ops") for source in ("planned", "simulated")}
    expected |= {("measured", table) for table in ("ops", "comms", "back")}
    assert {(source, table) for source, table, _, _ in found} >= expected
    tiles = Timeline(load([run_p4]))
    for source, table, row, title in found:
        assert title == title_of(table, tiles.table(source, 2, table, 0), row), (source, table)
