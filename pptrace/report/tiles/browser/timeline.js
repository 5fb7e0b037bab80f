/* The timeline: mounts itself into each .timeline, keeps its view in the address where it is the page's, and answers mouse and keys.
   Names of a trace are drawn or set as text, never as markup. Attributes of the element: data-tiles, the facts and tiles of a page that
   no server answers; data-view, the view to begin with, as addresses have it. */
(() => {
  const T = (window.pptraceTimeline = window.pptraceTimeline || {});
  const LABELS = 168;
  const NARROW = 480; // px of the timeline, as on a phone, below which the labels leave out what has no room in
  const NARROW_LABELS = 104;
  const MINI = 34; // height of the whole run
  const LEAST_SPAN = 50; // ns
  const LANE = 6;
  const MOST_SEARCHED = 4; // ranks whose kernels are opened for a search
  const LEAST_WITH_EVENTS = 36; // px of a rank's ops above its kernels
  const LEAST_WIDTH = 240; // px
  const RANGES = 1; // lane of ops
  const MOST_DEPTHS = 4;
  const MOST_OPEN = 64;
  const MOST_PINNED = 0.6; // of the height
  const LANES_PART = 0.5; // of the height, at most, as long as lanes of communication stay half as high as they would be
  const LEAST_LANE = 0.5;
  const MOST_LANE = 2.5; // where few ranks leave room
  const MOST_COMPUTE = 56; // px, before lanes grow too; twice that in the end
  const STAND_IN_LEVELS = 12;
  const NO_STEPS = "No pipeline steps in these traces.";
  const PART_OF_PAGE = 0.75; // of the window's height, among other things
  const ASK = "ceuxj/1234"; // keys of what a server answers
  const KEYS = [ // true: where a server answers
    ["wheel, W / S", "zoom in and out; in a longer page the wheel does so after a click, or with Ctrl"], ["drag, A / D, ← →", "move in time"], ["↑ ↓, wheel on the labels", "move over the rows"],
    ["Shift + drag, M", "measure a range"], ["M, U", "sum the range, or what is shown, by name", true],
    ["click an op", "its details"], ["click an op", "its microbatch over all stages and back", true], ["double click", "zoom to the op"],
    ["F", "whole step"], ["0", "whole run"], ["N / P", "next, previous step"], ["C", "critical path", true], ["L", "lanes of communication"],
    ["E", "kernels, operators and calls of the rank under the pointer, else of all", true], ["G", "group by stage, pipeline, replica, tp, cp or ep"], ["1 2 3 4", "planned, simulated, measured, what-if", true], ["+ / −", "taller, flatter rows"],
    ["/", "search: rank 3 F 12 · 2B7 · step 5 send · longest · gemm · exposed transfer", true], ["J", "the microbatch of what was found", true], ["O", "open or close all groups"],
    ["K", "keep the details of what is under the pointer, or was clicked"], ["R, click a rank", "pin the rank to the top"], ["X", "align all ranks by it; undo that", true],
    ["Esc", "undo selection"], ["?", "this list"],
  ];

  const make = (T.make = (tag, options = {}, ...children) => {
    const { className, text, title, ...rest } = options;
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    if (title) element.title = title;
    for (const [name, value] of Object.entries(rest)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  });

  class Timeline {
    constructor(root) {
      this.root = root;
      root.timeline = this;
      this.view = root.dataset.view;
      this.store = root.dataset.tiles ? new T.Page(root.dataset.tiles) : new T.Server();
      this.isWholePage = this.store.hasAnswers && this.view === undefined; // then the address has the view
      this.sources = ["measured"];
      this.change = null; // the fields of a what-if, as in an address, and what the server says of it
      this.order = "stage";
      this.open = null; // indices of open groups; null: as many ranks as can be seen
      this.scroll = 0;
      this.rowScale = 1;
      this.showLanes = true;
      this.frames = [];
      this.rows = [];
      this.pinned = new Set(); // indices of ranks whose rows stay at the top
      this.pinHeight = 0;
      this.laneScale = 1;
      this.pinnedPass = null; // whether pinned rows or the others are drawn
      this.alignment = null; // ns by which each rank is shifted, and why
      this.chosen = null; // the bar that was clicked
      this.kept = []; // bars whose details stay
      this.newest = {}; // the question of each kind that was asked last
      this.scale = T.scale();
      this.build();
      this.start();
    }

    async start() {
      this.about = await this.store.json("about").catch(() => null);
      if (!this.about || !this.about.ranks.length) {
        this.root.dataset.complete = true;
        this.root.querySelectorAll("canvas").forEach((canvas) => canvas.remove());
        this.root.querySelector(".timeline-tools").hidden = true;
        this.say(this.about ? `${NO_STEPS} Nor do they have any other op.` : "Nothing to draw: reload the page when there are traces.");
        this.about = null;
        return;
      }
      if (!this.store.hasAnswers && !window.DecompressionStream) return this.say("This browser cannot unpack the timeline: it needs one of 2023 or later.");
      this.tiles = new T.Tiles(this.store, () => this.redraw(), () => this.say("The files have changed. Reload the page."), (isThere) => this.say(isThere ? "" : "The server does not answer. What is missing is asked for again until it does."));
      this.blockOf = {};
      for (const [order, groups] of Object.entries(this.about.orders)) {
        this.blockOf[order] = new Map(groups.flatMap(([, ranks]) => ranks).map((at, index) => [at, Math.floor(index / this.about.block)]));
      }
      this.haveMemory = new Set(this.about.haveMemory);
      this.fit();
      const asked = new URLSearchParams(this.view ?? (this.isWholePage ? location.search : ""));
      this.read(asked);
      if (!this.about.steps.length) {
        this.say(`${NO_STEPS} What they have besides is drawn${this.isWholePage ? "; the overview has tables of it" : ""}.`);
        if (!this.t1) this.show(0, this.about.span);
      } else if (this.step === undefined) {
        this.goToStep(this.isWholePage && typeof T.dropdown === "number" ? T.dropdown : this.about.firstStep); // the header may know it later
      } else if (!this.t1) {
        this.goToStep(this.step);
        const [, , end] = this.about.steps.find(([known]) => known === this.step);
        const next = this.about.steps.find(([, begin]) => begin >= end);
        if (asked.get("period")) this.show(this.t0, next ? next[1] + (next[1] - this.t0) * 0.02 : this.about.span); // up to the next step
      }
      else this.tellStep();
      if (this.about.steps.length && !this.about.hasPipeline) this.say("No pipeline in these traces: what each rank computed and communicated is drawn.");
      this.isReady = true;
      this.isRestoring = true;
      this.updateTools();
      if (asked.get("whatif")) await this.setChange(asked.get("whatif"), (asked.get("sources") || "whatif").split(",").includes("whatif"));
      if (this.withEvents.size) await this.openEvents([...this.withEvents]);
      const isLeft = (kind) => !(kind in this.newest); // to the address: nobody has asked since, or taken back
      await this.restoreBars(asked, isLeft);
      if (asked.get("select") && isLeft("bar")) await this.select(...asked.get("select").split(".").map(Number));
      if (asked.get("critical") === "1") await this.toggleCritical();
      if (asked.get("find") && isLeft("find")) await this.find(asked.get("find"), asked.get("hit"));
      if (/^-?\d+\.-?\d+(\.\d+)*$/.test(asked.get("sum") || "") && isLeft("sum")) await this.restoreSum(asked.get("sum").split(".").map(Number));
      this.isRestoring = false;
      this.redraw();
    }

    /* The view and its address */

    read(asked) {
      const number = (name) => (asked.has(name) && Number.isFinite(Number(asked.get(name))) ? Number(asked.get(name)) : undefined);
      const step = number("step");
      if (this.about.steps.some(([known]) => known === step)) this.step = step;
      const sources = (asked.get("sources") || "").split(",").filter((source) => this.about.sources.includes(source));
      if (sources.length) this.sources = this.about.sources.filter((source) => sources.includes(source));
      if (asked.get("order") in this.about.orders) this.order = asked.get("order");
      if (asked.has("open")) this.open = new Set(asked.get("open").split(".").filter(Boolean).map(Number));
      if (asked.get("lanes") === "0") this.showLanes = false;
      this.rowScale = Math.min(Math.max(number("scale") || 1, 0.2), 6);
      this.marked = new Set((asked.get("rows") || "").split(".").filter(Boolean).map(Number));
      const isKnown = (text) => /^\d+$/.test(text) && Number(text) < this.about.ranks.length;
      this.pinned = new Set((asked.get("pinned") || "").split(".").filter(isKnown).map(Number));
      const [from, to] = [number("from"), number("to")];
      if (from !== undefined && to !== undefined && to - from >= LEAST_SPAN) [this.t0, this.t1] = [from, to];
      this.readEvents(asked);
      this.lay();
      this.scroll = number("top") || 0;
      if (asked.get("rows") && !asked.has("top")) this.scrollToMarked();
    }

    scrollToMarked() {
      const row = this.rows.find((each) => each.type === "rank" && this.marked.has(each.at));
      if (row) this.scroll = Math.max(row.y - 60, 0);
    }

    write() {
      clearTimeout(this.writing);
      this.writing = setTimeout(() => {
        if (!this.isWholePage || !this.isReady || this.isRestoring || !this.root.isConnected) return;
        const query = new URLSearchParams();
        if (this.step !== undefined) query.set("step", this.step);
        query.set("from", Math.round(this.t0));
        query.set("to", Math.round(this.t1));
        if (this.sources.join() !== "measured") query.set("sources", this.sources.join());
        if (this.order !== "stage") query.set("order", this.order);
        if (this.open) query.set("open", [...this.open].join("."));
        if (!this.showLanes) query.set("lanes", 0);
        this.writeEvents(query);
        if (this.rowScale !== 1) query.set("scale", this.rowScale.toFixed(3));
        if (this.scroll) query.set("top", Math.round(this.scroll));
        if (this.marked.size) query.set("rows", [...this.marked].join("."));
        if (this.pinned.size) query.set("pinned", [...this.pinned].join("."));
        if (this.chosen) query.set("bar", this.textOf(this.chosen));
        if (this.kept.length) query.set("kept", this.kept.map((bar) => this.textOf(bar)).join());
        if (this.alignment) query.set("align", this.textOf(this.alignment));
        if (this.journey) query.set("select", [this.journey.rank, this.journey.microbatch, this.journey.step].join("."));
        if (this.isCritical) query.set("critical", 1);
        if (this.found) {
          query.set("find", this.found.text);
          const [at, start] = this.found.bars[this.found.index] || [];
          if (at !== undefined) query.set("hit", `${at}.${start}`);
        }
        if (this.summed) query.set("sum", [...this.summed.range, ...(this.summed.ranks || [])].join("."));
        if (this.change) query.set("whatif", this.change.fields);
        history.replaceState(history.state, "", `${location.pathname}?${query}`);
      }, 120);
    }

    get zero() {
      const step = this.about.steps.find(([number]) => number === this.step);
      return step ? step[1] : 0;
    }

    /* Times count from here: the start of the step, or what the ranks are aligned by. */
    get axisZero() {
      return this.alignment ? this.alignment.start : this.zero;
    }

    shiftOf(at) {
      return this.alignment ? (this.alignment.shifts.get(at) ?? 0) : 0;
    }

    x(time) {
      return this.left + ((time - this.t0) / (this.t1 - this.t0)) * (this.right - this.left);
    }

    timeAt(x) {
      return this.t0 + ((x - this.left) / (this.right - this.left)) * (this.t1 - this.t0);
    }

    show(t0, t1) {
      const all = this.about.span;
      const width = Math.min(Math.max(t1 - t0, LEAST_SPAN), all * 1.1);
      let begin = (t0 + t1) / 2 - width / 2;
      begin = Math.min(Math.max(begin, -0.05 * all - width * 0.5), all * 1.05 - width * 0.5);
      this.hideTip(); // it would speak of what is elsewhere now
      this.t0 = Math.round(begin); // as the address has it, so that a link restores every pixel
      this.t1 = this.t0 + Math.round(width);
      this.redraw();
      this.write();
    }

    zoom(factor, x = (this.left + this.right) / 2) {
      const middle = this.timeAt(x);
      this.show(middle - (middle - this.t0) * factor, middle + (this.t1 - middle) * factor);
    }

    move(part) {
      const by = (this.t1 - this.t0) * part;
      this.show(this.t0 + by, this.t1 + by);
    }

    goToStep(number) {
      const step = this.about.steps.find(([known]) => known === number);
      if (!step) return;
      const margin = (step[2] - step[1]) * 0.015;
      this.setStep(number);
      this.show(step[1] - margin, step[2] + margin);
    }

    setStep(number) {
      this.step = number;
      this.critical = null;
      if (this.isCritical) this.loadCritical();
      this.tellStep();
    }

    /* The step of a time. */
    stepAt(time) {
      return this.about.steps.find(([, begin, end]) => time >= begin && time <= end);
    }

    tellStep() {
      if (this.isWholePage && T.dropdown !== this.step && window.dash_clientside && window.dash_clientside.set_props) {
        T.dropdown = this.step;
        window.dash_clientside.set_props("step", { value: this.step });
      }
    }

    neighbourStep(by) {
      const index = this.about.steps.findIndex(([number]) => number === this.step) + by;
      if (this.about.steps[index]) this.goToStep(this.about.steps[index][0]);
    }

    /* Rows. All sizes are px of a screen of usual width; on wide ones everything is drawn larger by this.scale. */

    size() {
      const box = this.box.getBoundingClientRect();
      return { width: Math.max(Math.round(box.width), LEAST_WIDTH) / this.scale, height: this.height || 400 };
    }

    /* Take the width that there is. */
    fit() {
      this.right = this.size().width;
      this.left = this.right < NARROW ? NARROW_LABELS : LABELS;
      this.mini.style.setProperty("--labels", `${this.left}px`);
    }

    /* The lanes of a rank that have bars. */
    lanesOf(source, compute, at) {
      const lanes = [{ name: "compute", table: "ops", lane: 0, height: compute, isCompute: true, depths: 1 }];
      const { ops, comms } = this.about.tables;
      lanes[0].depths = ops.depths.compute || 1;
      if (source !== "measured" || !this.showLanes) return lanes;
      const isFlat = this.about.ranks.length > 16;
      const each = (isFlat ? 3 : LANE) * Math.min(this.rowScale, 2) * this.laneScale;
      comms.lanes.forEach((name, lane) => {
        const depths = comms.depthsOfRanks[at][lane];
        if (depths) lanes.push({ name, table: "comms", lane, depths, height: each * Math.min(depths, MOST_DEPTHS) });
      });
      if (this.haveMemory.has(at)) lanes.push({ name: "memory", table: "memory", lane: 0, depths: 1, height: (isFlat ? 8 : 18) * Math.min(this.rowScale, 2) });
      const depths = ops.depthsOfRanks[at][RANGES];
      if (depths) lanes.push({ name: "ranges", table: "ops", lane: RANGES, depths, height: (LANE + 2) * Math.min(depths, MOST_DEPTHS) });
      return lanes;
    }

    lay() {
      if (!this.about) return;
      const groups = this.about.orders[this.order];
      const numRanks = this.about.ranks.length;
      const isGrouped = (this.isGrouped = numRanks > 16 || this.order !== "stage");
      const open = this.open || new Set(numRanks <= MOST_OPEN ? groups.keys() : []);
      this.scale = T.scale();
      const free = this.isWholePage ? window.innerHeight - this.box.getBoundingClientRect().top - window.scrollY : window.innerHeight * PART_OF_PAGE;
      const room = Math.max(free / this.scale - 60, 300) - T.AXIS;
      this.isOpen = (group) => !isGrouped || open.has(group);
      const ranks = groups.flatMap(([, of], index) => of.filter((at) => this.isOpen(index) || this.pinned.has(at)));
      const shown = ranks.length;
      const sources = this.sources;
      const sumOf = (lanes) => lanes.reduce((sum, lane) => sum + lane.height + 1, 0);
      const heightOfEvents = ranks.reduce((sum, at) => sum + sumOf(this.eventLanesOf(at)), 0) / Math.max(shown, 1);
      const heightOfLanes = () => ranks.reduce((sum, at) => sum + sumOf(this.lanesOf("measured", 0, at)), 0) / Math.max(shown, 1);
      this.laneScale = 1;
      if (sources.includes("measured")) this.laneScale = Math.min(Math.max((room * LANES_PART) / (heightOfLanes() * Math.max(shown, 1)), LEAST_LANE), 1);
      const perSource = () => (room / Math.max(shown, 1) - (sources.includes("measured") ? heightOfLanes() + heightOfEvents : 0) - 8) / sources.length * 0.92;
      const spare = perSource() - MOST_COMPUTE;
      if (spare > 0) this.laneScale = Math.min(1 + spare / (2 * MOST_COMPUTE), MOST_LANE);
      const least = heightOfEvents ? LEAST_WITH_EVENTS : numRanks > 16 ? 12 : 14;
      const compute = Math.min(Math.max(perSource(), least * (this.about.tables.ops.depths.compute > 1 ? 1.5 : 1)), 2 * MOST_COMPUTE) * this.rowScale;
      const closed = Math.min(Math.max((room / groups.length) * 0.98, 30), 64) * this.rowScale * Math.max(sources.length * 0.6, 1);
      this.rows = [];
      const atTop = this.layPinned(compute, room * MOST_PINNED);
      let y = 0;
      groups.forEach(([label, ranks], index) => {
        if (isGrouped) {
          const height = this.isOpen(index) ? 22 : closed;
          this.rows.push({ type: "group", index, label, ranks, y, height, isOpen: this.isOpen(index), isPinned: false });
          y += height;
        }
        if (!this.isOpen(index)) return;
        for (const at of ranks) if (!atTop.has(at)) y += this.addRank(at, y, compute, false).height;
      });
      this.content = y;
      this.height = Math.round(Math.min(Math.max(y + this.pinHeight + T.AXIS + 2, 200), room + T.AXIS));
      this.rowOfRank = new Map(this.rows.filter((row) => row.type === "rank").map((row) => [row.at, row]));
      this.rowOfGroup = new Map(this.rows.filter((row) => row.type === "group").map((row) => [row.index, row]));
      this.scroll = Math.min(this.scroll, this.mostScroll);
    }

    addRank(at, y, compute, isPinned) {
      let top = 3;
      const parts = [];
      for (const source of this.sources) {
        const all = [...this.lanesOf(source, compute, at), ...(source === "measured" ? this.eventLanesOf(at) : [])];
        const lanes = all.map((lane) => {
          const laid = { ...lane, top };
          top += lane.height + 1;
          return laid;
        });
        parts.push({ source, top: lanes[0].top, compute, lanes, bottom: top });
        top += 2;
      }
      const row = { type: "rank", at, y, height: top + 2, sources: parts, isPinned };
      this.rows.push(row);
      return row;
    }

    /* The pinned rows that there is room for; the others stay where they are. */
    layPinned(compute, most) {
      const atTop = new Set();
      let y = 0;
      for (const at of this.pinned) {
        const row = this.addRank(at, y, compute, true);
        if (y + row.height > most && atTop.size) {
          this.rows.pop();
          break;
        }
        y += row.height;
        atTop.add(at);
      }
      this.pinHeight = y ? y + 4 : 0;
      return atTop;
    }

    get mostScroll() {
      return Math.max(this.content - (this.height - T.AXIS - this.pinHeight), 0);
    }

    topOf(row) {
      return T.AXIS + row.y + (row.isPinned ? 0 : this.pinHeight - this.scroll);
    }

    placeOf(source, table, at, laneCode, depth) {
      const row = this.rowOfRank.get(at);
      const part = row && row.sources.find((each) => each.source === source);
      if (!part) return null;
      const isBack = table === "back";
      const lane = isBack ? part.lanes[0] : part.lanes.find((each) => each.table === table && each.lane === laneCode);
      if (!lane || (isBack && laneCode === 0)) return null;
      const y = this.topOf(row) + lane.top;
      if (y > this.height || y + lane.height < T.AXIS || !this.isSeen(row, y)) return null;
      const each = lane.height / lane.depths;
      return isBack || lane.depths === 1 ? [y, lane.height] : [y + depth * each, Math.max(each - (each > 3 ? 1 : 0), 0.7)];
    }

    /* Whether a row belongs to what is being drawn; outside a pass, whether the pinned rows leave this height of it free. */
    isSeen(row, y) {
      return this.pinnedPass === null ? row.isPinned || !this.pinHeight || y >= T.AXIS + this.pinHeight : row.isPinned === this.pinnedPass;
    }

    rowSpot(at) {
      const row = this.rowOfRank.get(at);
      const part = row && row.sources.find((each) => each.source === "measured");
      return part && this.isSeen(row, this.topOf(row)) ? [this.topOf(row) + part.top - 2, part.bottom - part.top + 3] : null;
    }

    groupSpot(index, source) {
      const row = this.rowOfGroup.get(index);
      if (!row || row.isOpen || !this.isSeen(row, this.topOf(row))) return null;
      const y = this.topOf(row);
      if (y > this.height || y + row.height < T.AXIS) return null;
      const each = (row.height - 5) / this.sources.length;
      return [y + 2 + this.sources.indexOf(source) * each, each - 1];
    }

    visibleRows() {
      return this.rows.filter((row) => this.topOf(row) + row.height > T.AXIS + (row.isPinned ? 0 : this.pinHeight) && this.topOf(row) < this.height);
    }

    /* Tiles */

    get shift() {
      const perPixel = (this.t1 - this.t0) / (this.right - this.left);
      return Math.max(0, Math.floor(Math.log2(perPixel)));
    }

    time(shift, index) {
      const width = this.about.buckets * 2 ** shift;
      return { begin: index * width, end: (index + 1) * width };
    }

    /* A source in a path of the server: what-if is named by its change. */
    nameOf(source) {
      return source === "whatif" ? encodeURIComponent(this.change.source) : source;
    }

    /* The step of a source in a path of the server: what was measured is of all. */
    stepOf(source) {
      return source === "measured" ? 0 : this.step ?? 0;
    }

    /* What journeys and sums are of. */
    get mainSource() {
      return this.sources.includes("measured") ? "measured" : this.sources[0];
    }

    /* The order whose blocks of ranks tiles have. */
    get tileOrder() {
      return this.about.tileOrder || this.order;
    }

    blockAt(at) {
      return this.blockOf[this.tileOrder].get(at);
    }

    path(kind, name, block, shift, index) {
      if (kind === "events") return `events/${block}/${shift}/${index}`;
      if (kind === "memory") return `memory/${this.tileOrder}/${block}/${shift}/${index}`;
      const [source, step] = [this.nameOf(name), this.stepOf(name)];
      return kind === "tile" ? `tile/${source}/${step}/${this.tileOrder}/${block}/${shift}/${index}` : `groups/${source}/${step}/${this.order}/${shift}/${index}`;
    }

    /* The indices of the tiles that show the view, or the view as a rank has it that is shifted. */
    indices(shift, at, least = 0, most = this.about.span) {
      const width = this.about.buckets * 2 ** shift;
      const moved = at === undefined ? 0 : this.shiftOf(at);
      const first = Math.floor(Math.max(this.t0 - moved, least) / width);
      const last = Math.floor(Math.min(this.t1 - moved, most) / width);
      return Array.from({ length: Math.max(last - first + 1, 0) }, (_, index) => first + index);
    }

    gather() {
      const rows = this.visibleRows();
      const ranks = rows.filter((row) => row.type === "rank").map((row) => row.at);
      const blocks = this.alignment ? ranks.map((at) => [this.blockAt(at), at]) : [...new Set(ranks.map((at) => this.blockAt(at)))].map((block) => [block]);
      const hasGroups = rows.some((row) => row.type === "group" && !row.isOpen);
      const shift = this.shift;
      this.wanted = new Set();
      this.drawn = [];
      this.taken = new Set();
      this.numMissing = 0;
      this.coarse = new Set(); // kinds of tiles of which finer ones were asked for than there are
      for (const source of this.sources) {
        const hasMemory = source === "measured" && this.about.mostBytes && this.showLanes;
        for (const kind of hasMemory ? ["tile", "memory"] : ["tile"]) {
          for (const [block, only] of blocks) for (const index of this.indices(shift, only)) this.take(kind, source, block, shift, index, only);
        }
        if (hasGroups) for (const index of this.indices(shift)) this.take("groups", source, 0, shift, index);
      }
      for (const at of this.sources.includes("measured") ? ranks : []) {
        if (!this.eventLanesOf(at).length) continue;
        for (const index of this.indices(shift, at, -Infinity, Infinity)) this.take("events", "measured", at, shift, index, at);
      }
      const mini = this.miniPath();
      if (!this.tiles.get(mini)) this.wanted.add(mini);
      this.tiles.want([...this.wanted]);
    }

    take(kind, source, block, askedShift, askedIndex, only) {
      const times = this.store.timesOf((...time) => this.path(kind, source, block, ...time), askedShift, askedIndex);
      for (const time of times) this.takeTile(kind, source, block, time, [askedShift, askedIndex], only);
    }

    takeTile(kind, source, block, [shift, index], asked, only) {
      const path = this.path(kind, source, block, shift, index);
      const tile = this.tiles.get(path);
      const isCoarser = shift > asked[0];
      const hasEvents = Boolean(tile?.sections?.memory?.held); // from which buckets of any time are made
      const time = this.time(...(isCoarser && hasEvents ? asked : [shift, index]));
      const place = `${path} ${time.begin} ${only}`;
      if (this.taken.has(place)) return; // a coarser one than asked for, which is drawn already
      this.taken.add(place);
      const clip = Object.values(time);
      if (tile) {
        const isWhole = kind === "tile" ? Object.values(tile.sections || {}).every(({ cellTrack }) => !cellTrack?.length) : hasEvents;
        if (isCoarser && !isWhole) this.coarse.add(kind);
        if (!tile.missing) this.addPart(kind, source, tile, time, clip, false, only);
        return;
      }
      this.wanted.add(path);
      this.numMissing += 1;
      for (let up = 1; up <= STAND_IN_LEVELS; up += 1) {
        const parent = this.tiles.get(this.path(kind, source, block, shift + up, Math.floor(index / 2 ** up)));
        if (parent && !parent.missing) return this.addPart(kind, source, parent, this.time(shift + up, Math.floor(index / 2 ** up)), clip, true, only);
      }
      for (let child = 0; child < 2 && shift > 0; child += 1) {
        const finer = this.tiles.get(this.path(kind, source, block, shift - 1, index * 2 + child));
        const time = this.time(shift - 1, index * 2 + child);
        if (finer && !finer.missing) this.addPart(kind, source, finer, time, Object.values(time), true, only);
      }
    }

    addPart(kind, source, tile, time, clip, isStandIn, only) {
      const sections = tile.sections.memory?.held ? { memory: T.inBuckets(tile.sections.memory, time, this.about.buckets) } : tile.sections;
      const isMeant = (at) => only === undefined || at === only;
      this.drawn.push({
        type: kind, source, tile, sections, time, clip, isStandIn, only, shift: only === undefined ? 0 : this.shiftOf(only),
        texts: sections.ops ? { kind: sections.ops.kinds } : null,
        placeOf: (table, at, lane, depth) => (isMeant(at) ? this.placeOf(source, table, at, lane, depth) : null),
        memorySpot: (at) => (isMeant(at) ? this.placeOf("measured", "memory", at, 0, 0) : null),
        rowOf: (at) => (source === "measured" && isMeant(at) ? this.rowSpot(at) : null),
        groupSpot: (index) => this.groupSpot(index, source),
      });
    }

    miniPath() {
      const shift = this.store.shift ?? Math.max(Math.ceil(Math.log2(this.about.span / this.about.buckets)), 0);
      return `groups/measured/0/pipeline/${shift}/0`;
    }

    /* Drawing */

    redraw() {
      if (this.isAsked || !this.about || this.t1 === undefined) return;
      this.isAsked = true;
      requestAnimationFrame(() => {
        this.isAsked = false;
        if (this.root.isConnected) this.draw();
      });
    }

    draw() {
      const began = performance.now();
      this.lay();
      this.fit();
      const size = this.size();
      const ratio = (window.devicePixelRatio || 1) * this.scale;
      const [width, height] = [Math.round(size.width * ratio), Math.round(size.height * ratio)];
      if (this.canvas.width !== width || this.canvas.height !== height) {
        this.canvas.width = width;
        this.canvas.height = height;
        this.canvas.style.height = `${size.height * this.scale}px`;
      }
      this.gather();
      const ctx = this.canvas.getContext("2d", { alpha: false });
      ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
      T.draw(ctx, this, size, this.marks());
      const mini = this.mini.getContext("2d");
      const wide = Math.round((size.width - this.left) * this.scale);
      if (this.mini.width !== wide) Object.assign(this.mini, { width: wide, height: Math.round(MINI * this.scale) });
      const tile = this.tiles.get(this.miniPath());
      if (tile && tile.sections) tile.bucket = 2 ** Number(this.miniPath().split("/")[4]);
      T.drawMinimap(mini, this, tile, this.mini.width, this.mini.height, this.palette);
      this.frames.push(performance.now() - began);
      if (this.frames.length > 400) this.frames.shift();
      const isComplete = this.isReady && !this.isRestoring && !this.numReading && !this.tiles.isWaiting && this.numMissing === 0;
      this.root.dataset.complete = isComplete;
      this.status.textContent = this.numReading ? "reading kernels and operators …" : this.coarse.size ? this.coarseNote() : isComplete || !this.tiles.isWaiting ? "" : "loading …";
    }

    coarseNote() {
      if (this.coarse.has("tile")) return "coarse: this file does not hold each bar of this time";
      return `coarse: this file holds no finer ${this.coarse.has("memory") ? "memory" : "shares of closed groups"} of this time`;
    }

    marks() {
      return {
        colours: this.palette, critical: this.isCritical ? this.critical : null, journey: this.journey, found: this.found,
        measure: this.measured, rows: this.marked, chosen: this.chosen, kept: this.kept, alignment: this.alignment,
      };
    }

    /* What is under the pointer */

    barAt(x, y) {
      if (x < this.left || y < T.AXIS) return null;
      const pointed = this.timeAt(x);
      const slack = ((this.t1 - this.t0) / (this.right - this.left)) * 2;
      for (const table of ["ops", "comms", "events", "back"]) {
        let best = null;
        for (const part of this.drawn || []) {
          const time = pointed - part.shift;
          if (!part.sections[table] || part.isStandIn || time < part.clip[0] - slack || time > part.clip[1] + slack) continue;
          const section = part.sections[table];
          const spots = section.rank.map((at, index) => {
            const spot = part.placeOf(table, at, section.lane[index], section.depth[index]);
            return spot && y >= spot[0] - 0.5 && y < spot[0] + spot[1] + 0.5 ? spot : null;
          });
          for (let bar = 0; bar < section.start.length; bar += 1) {
            if (!spots[section.track[bar]]) continue;
            const [start, end] = [section.start[bar], section.start[bar] + section.length[bar]];
            const away = Math.max(start - time, time - end, 0);
            if (away <= slack && (!best || away < best.away || (away === best.away && section.length[bar] < best.length))) {
              const track = section.track[bar];
              best = { part, table, section, bar, away, start, length: section.length[bar], at: section.rank[track], lane: section.lane[track], row: section.row[bar] };
            }
          }
          if (best) continue;
          const bucket = Math.floor((time - part.time.begin) / 2 ** Math.round(Math.log2((part.time.end - part.time.begin) / this.about.buckets)));
          for (let cell = 0; cell < section.cellTrack.length; cell += 1) {
            if (section.cellBucket[cell] === bucket && spots[section.cellTrack[cell]]) {
              const track = section.cellTrack[cell];
              best = { part, table, section, cell, away: 0, count: section.cellCount[cell], row: section.cellLongest[cell], at: section.rank[track], lane: section.lane[track] };
            }
          }
        }
        if (best) return best;
      }
      return null;
    }

    memoryAt(x, y) {
      if (x < this.left || y < T.AXIS || !this.about.mostBytes) return null;
      for (const part of this.drawn || []) {
        const time = this.timeAt(x) - part.shift;
        if (part.type !== "memory" || part.isStandIn || time < part.clip[0] || time >= part.clip[1]) continue;
        const { rank, bytes } = part.sections.memory;
        for (let row = 0; row < rank.length; row += 1) {
          const spot = part.memorySpot(rank[row]);
          if (!spot || y < spot[0] || y >= spot[0] + spot[1]) continue;
          const { buckets } = this.about;
          const bucket = Math.floor(((time - part.time.begin) / (part.time.end - part.time.begin)) * buckets);
          return [["", "Memory"], ["rank", String(this.about.ranks[rank[row]].rank)], ["allocated", T.bytes(bytes[row * buckets + bucket])], ["most of the run", T.bytes(this.about.mostBytes)]];
        }
      }
      return null;
    }

    groupAt(x, y) {
      const row = this.rowAt(y);
      return row && row.type === "group" && x >= 0 ? row : null;
    }

    rowAt(y) {
      const isOver = (row) => y >= this.topOf(row) && y < this.topOf(row) + row.height && this.isSeen(row, y);
      return y < T.AXIS ? undefined : this.rows.find(isOver);
    }

    localLines(hit) {
      const { part, section, at } = hit;
      if (hit.cell !== undefined) {
        if (!this.store.hasAnswers) {
          const time = part.time.begin + ((section.cellBucket[hit.cell] + 0.5) / this.about.buckets) * (part.time.end - part.time.begin);
          const isHeld = this.store.hasEachBar((...place) => this.path("tile", part.source, this.blockAt(at), ...place), time);
          const bars = hit.count > 1 ? `${hit.count.toLocaleString("en")} bars` : "1 bar";
          return [["", isHeld ? `${bars}, too short to be seen at this zoom` : `${bars}, of which this file holds only shares of time`]];
        }
        const words = hit.count > 1 ? `${hit.count.toLocaleString("en")} bars begin here, the longest:` : "too short to be seen at this zoom:";
        return [["", words]];
      }
      const lines = [["", T.titleOf(this, hit)], ["rank", String(this.about.ranks[at].rank)], ["from", T.duration(hit.start - this.zero)], ["length", T.duration(hit.length)]];
      if (!this.store.hasAnswers) lines.push(...T.ownLines(this, hit));
      if (this.alignment) lines.splice(2, 0, ["drawn", part.shift ? `${T.duration(Math.abs(part.shift))} ${part.shift < 0 ? "earlier" : "later"} than it was` : "when it was"]);
      return lines;
    }

    hover(event) {
      const [x, y] = this.pointer(event);
      this.lastY = y;
      const hit = this.barAt(x, y);
      this.pointed = hit;
      clearTimeout(this.asking);
      if (!hit) {
        this.tip.hidden = true;
        const held = this.memoryAt(x, y);
        if (held) this.showTip(event, held);
        const group = x > this.left && this.groupAt(x, y);
        const row = x < this.left && this.rowAt(y);
        if (row && row.type === "rank") this.showTip(event, [["", `rank ${this.about.ranks[row.at].rank}`], ["", T.isOnToggle(this, row, x, y) ? "click for its kernels, operators and calls" : row.isPinned ? "click to unpin" : "click to pin to the top"]]);
        if (group && !group.isOpen) this.showTip(event, [["", group.label], ["ranks", String(group.ranks.length)], ["", "click to open"]]);
        this.lastHit = "";
        return;
      }
      const { source } = hit.part;
      const isEvent = hit.table === "events";
      const place = isEvent ? this.about.ranks[hit.at].rank : `${this.nameOf(source)}/${this.stepOf(source)}/${hit.table}`;
      const name = `${isEvent ? "event" : "bar"}/${this.about.token}/${place}/${hit.row}`;
      const local = this.localLines(hit);
      if (this.store.hasAnswers && name !== this.lastHit) {
        this.lastHit = name;
        this.more = null;
        this.asking = setTimeout(async () => {
          const more = await this.store.json(name).catch(() => null);
          if (!more || this.lastHit !== name) return;
          this.more = more;
          this.showTip(event, this.merged(hit, local, more));
        }, 60);
      }
      this.showTip(event, this.more ? this.merged(hit, local, this.more) : local);
    }

    merged(hit, local, more) {
      if (hit.cell !== undefined) return [...local, ...more];
      const [title, ...rest] = more;
      const from = local.find(([name]) => name === "from");
      const moved = local.find(([name]) => name === "drawn");
      const note = hit.part.source === "measured" ? [] : [["source", T.sourceName(hit.part.source)], ...(hit.part.source === "whatif" ? [["change", this.change.name]] : [])];
      return [title, ...note, from, moved, ...rest].filter(Boolean);
    }

    showTip(event, lines) {
      this.tip.replaceChildren(
        ...lines.map(([name, value]) => (name ? make("div", {}, make("span", { className: "tip-name", text: name }), make("span", { text: value })) : make("strong", { text: value }))),
      );
      this.tip.hidden = false;
      this.tip.style.left = 0; // as wide as it wants to be, wherever it was
      const box = this.box.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const width = this.tip.offsetWidth;
      const height = this.tip.offsetHeight;
      this.tip.style.left = `${x + 16 + width > box.width ? Math.max(x - width - 12, 0) : x + 16}px`;
      this.tip.style.top = `${Math.max(Math.min(y + 14, this.height * this.scale - height - 4), 0)}px`;
    }

    /* Journey, critical path, search */

    async select(rank, microbatch, step) {
      const source = this.mainSource;
      const hops = await this.ask("bar", this.store.json(`journey/${this.about.token}/${this.nameOf(source)}/${step}/${rank}/${microbatch}`).catch(() => []));
      if (!hops || !hops.length) return;
      this.journey = { rank, microbatch, step, source, hops, focus: null };
      this.changedSide();
    }

    reveal(at) {
      let row = this.rowOfRank.get(at);
      if (!row) {
        const index = this.about.orders[this.order].findIndex(([, ranks]) => ranks.includes(at));
        this.toggleGroup(index, true);
        row = this.rowOfRank.get(at);
      }
      if (!row || row.isPinned) return;
      if (row.y < this.scroll) this.scroll = row.y;
      const height = this.height - T.AXIS - this.pinHeight;
      if (row.y + row.height > this.scroll + height) this.scroll = row.y + row.height - height;
    }

    /* The answer to a question; undefined where another one of its kind was asked meanwhile, or it was taken back. */
    async ask(kind, question) {
      this.newest[kind] = question;
      const answer = await question;
      return this.newest[kind] === question ? answer : undefined;
    }

    takeBack(...kinds) {
      for (const kind of kinds) this.newest[kind] = null;
    }

    async loadCritical() {
      const question = this.store.json(`critical/${this.about.token}/${this.step}`).catch(() => ({ ops: [], reason: T.NO_ANSWER }));
      const { ops, reason } = (await this.ask("critical", question)) || {};
      if (!ops) return;
      this.critical = ops;
      this.say(reason ? `Critical path: ${reason}` : "");
      this.redraw();
    }

    toggleCritical() {
      this.isCritical = !this.isCritical;
      if (!this.isCritical) {
        this.takeBack("critical");
        this.say("");
      }
      this.updateTools();
      this.redraw();
      this.write();
      return this.isCritical ? this.loadCritical() : null;
    }

    async find(text, hit) {
      this.searchBox.value = text;
      const ask = () => {
        const query = new URLSearchParams({ q: text, from: Math.round(this.t0), events: [...this.withEvents].join(".") });
        return this.ask("find", this.store.json(`find/${this.about.token}?${query}`).catch(() => ({ total: 0, found: [], unknown: [], isMissing: true })));
      };
      let answer = await ask();
      if (answer && answer.unknown.length && !this.isRestoring && !this.withEvents.size && this.haveEvents.size) { // it may be the name of a kernel
        await this.openEvents(this.ranksShown().slice(0, MOST_SEARCHED));
        answer = await ask();
        if (answer && answer.unknown.length) this.toggleEvents();
      }
      if (!answer) return;
      const { total, found, unknown, first, isMissing } = answer;
      const index = hit ? found.findIndex(([at, start]) => `${at}.${start}` === hit) - 1 : -1;
      this.found = text ? { text, bars: found, index: Math.max(index, -1), total, first } : null;
      this.foundNote.textContent = !text ? "" : isMissing ? T.NO_ANSWER : unknown.length ? `not known here: ${unknown.join(", ")}` : total ? `${total.toLocaleString("en")} found` : "none";
      if (found.length) this.nextFound(1);
      else this.redraw();
      this.write();
    }

    nextFound(by) {
      const { bars, total } = this.found;
      this.found.index = (this.found.index + by + bars.length) % bars.length;
      const [at, start, length] = bars[this.found.index];
      const place = (this.found.first + this.found.index) % total;
      this.foundNote.textContent = `${(place + 1).toLocaleString("en")} of ${total.toLocaleString("en")}`;
      const all = this.about.span;
      const width = Math.min(Math.max(Math.min(this.t1 - this.t0, length * 40), length * 4, 1000), all);
      const begin = Math.max(Math.min(start + length / 2 + this.shiftOf(at) - width / 2, all - width), 0);
      if (!this.isRestoring) this.show(begin, begin + width); // a link says itself what is shown
      this.reveal(at);
      const step = this.stepAt(start);
      if (step && step[0] !== this.step) this.setStep(step[0]);
      this.redraw();
    }

    selectFound() {
      const [at, start, , , , , microbatch] = this.found?.bars[this.found.index] || [];
      const step = this.stepAt(start);
      if (step && microbatch >= 0) this.select(this.about.ranks[at].rank, microbatch, step[0]);
    }

    /* The rank under the pointer, if it is over one. */
    pointedRank() {
      const row = this.lastY === undefined ? undefined : this.rowAt(this.lastY);
      return row && row.type === "rank" ? row.at : undefined;
    }

    hideTip() {
      clearTimeout(this.asking);
      this.lastHit = "";
      this.tip.hidden = true;
    }

    escape() {
      this.hideTip();
      if (!this.help.hidden) return this.toggleHelp(); // what lies above goes first, and nothing else with it
      this.takeBack("bar", "find");
      this.journey = null;
      this.chosen = null;
      this.unsum();
      this.isMeasuring = false;
      this.found = null;
      this.foundNote.textContent = "";
      this.searchBox.value = "";
      this.marked.clear();
      this.fillSide();
      this.updateTools();
      this.redraw();
      return this.write();
    }

    toggleSource(source) {
      if (!this.about.sources.includes(source)) return;
      const shown = this.sources.includes(source) ? this.sources.filter((each) => each !== source) : [...this.sources, source];
      if (!shown.length) return;
      this.sources = this.about.sources.filter((each) => shown.includes(each));
      this.changed();
    }

    /* A step as it would be after a change: the fields are those of the page of bubbles. */
    async setChange(fields, isShown = true) {
      const without = (sources) => sources.filter((each) => each !== "whatif");
      this.about.sources = without(this.about.sources);
      this.sources = without(this.sources);
      this.change = null;
      if (fields) {
        this.say("What-if: predicting …");
        const answer = await this.ask("whatif", this.store.json(`whatif/${this.about.token}?${fields}`).catch(() => ({ reason: T.NO_ANSWER })));
        if (!answer) return;
        if (answer.reason) this.say(`What-if: ${answer.reason}`);
        else {
          this.say("");
          this.change = { fields, ...answer };
          this.about.sources.push("whatif");
          if (isShown) this.sources.push("whatif");
        }
      } else {
        this.takeBack("whatif");
        this.say("");
      }
      if (!this.sources.length) this.sources = ["measured"];
      this.changed();
    }

    toggleGroup(index, isOpen) {
      const groups = this.about.orders[this.order];
      const open = new Set([...groups.keys()].filter((each) => this.isOpen(each)));
      if (isOpen ?? !open.has(index)) open.add(index);
      else open.delete(index);
      this.open = open;
      this.changed();
    }

    toggleGroups() {
      const groups = this.about.orders[this.order];
      const isAnyOpen = [...groups.keys()].some((index) => this.isOpen(index));
      this.open = new Set(isAnyOpen ? [] : [...groups.keys()].slice(0, MOST_OPEN));
      this.changed();
    }

    regroup() {
      const orders = Object.keys(this.about.orders);
      this.order = orders[(orders.indexOf(this.order) + 1) % orders.length];
      this.open = null;
      this.changed();
    }

    scaleRows(factor) {
      this.rowScale = Math.min(Math.max(this.rowScale * factor, 0.2), 6);
      this.changed();
    }

    changed() {
      this.hideTip();
      this.lay();
      this.updateTools();
      this.redraw();
      this.write();
    }

    changedSide() {
      this.fillSide();
      this.redraw();
      this.write();
    }

    /* Elements */

    build() {
      this.palette = T.colours(this.root);
      this.canvas = make("canvas", { className: "timeline-canvas", tabindex: 0, role: "application", "aria-label": "Timeline of all ranks; press ? for keys" });
      this.mini = make("canvas", { className: "timeline-mini", height: MINI, "aria-hidden": "true" });
      this.tip = make("div", { className: "timeline-tip", role: "tooltip" });
      this.tip.hidden = true;
      this.side = make("div", { className: "timeline-side", role: "group", "aria-label": "Details and the journey of a microbatch" });
      this.side.hidden = true;
      const keys = KEYS.filter(([, , needsAnswers]) => this.store.hasAnswers || !needsAnswers);
      this.help = make("dl", { className: "timeline-help" }, ...keys.flatMap(([key, text]) => [make("dt", { text: key }), make("dd", { text })]));
      this.help.hidden = true;
      this.status = make("span", { className: "note timeline-status" });
      this.message = make("p", { className: "note timeline-message", ...this.id("timeline-message"), role: "status" });
      this.message.hidden = true;
      this.alignNote = make("p", { className: "note timeline-message timeline-aligned", ...this.id("timeline-aligned"), role: "status" });
      this.alignNote.hidden = true;
      this.box = make("div", { className: "timeline-box" }, this.canvas, this.status, this.tip, this.help);
      this.legendBox = make("div", { className: "timeline-legend" });
      this.root.replaceChildren(this.tools(), this.message, this.alignNote, make("div", { className: "timeline-columns" }, make("div", { className: "timeline-left" }, this.mini, this.box), this.side), this.legendBox);
      this.listen();
    }

    /* An id for one element of a page that has one timeline alone. */
    id(name) {
      return this.isWholePage ? { id: name } : {};
    }

    button(text, title, action, options = {}) {
      const button = make("button", { type: "button", className: "tool", text, title, ...options });
      button.addEventListener("click", action);
      return button;
    }

    tools() {
      this.sourceButtons = new Map(["planned", "simulated", "measured", "whatif"].map((source, index) => [source, this.button(T.sourceName(source), `Show or hide (${index + 1})`, () => this.toggleSource(source), { "data-source": source, ...(source === "whatif" ? { hidden: "" } : {}) })]));
      this.searchBox = make("input", { type: "search", placeholder: "Search: rank 3 F 12", className: "timeline-search", title: "Ops and communication (rank 3 F 12, step 5 send, longest), names of kernels, operators and lanes, words of the legend; Enter goes on, Shift and Enter back (/)", "aria-label": "Search", ...this.id("timeline-search"), maxlength: 200, list: "timeline-words", autocomplete: "off" });
      this.words = make("datalist", { id: "timeline-words" });
      this.searchBox.addEventListener("keydown", (event) => {
        event.stopPropagation();
        if (event.key === "Enter") {
          if (this.found && this.found.text === this.searchBox.value && this.found.bars.length) this.nextFound(event.shiftKey ? -1 : 1);
          else this.find(this.searchBox.value);
        }
        if (event.key === "Escape") {
          this.escape();
          this.canvas.focus();
        }
      });
      this.changeBox = make("select", { className: "timeline-whatif", ...this.id("timeline-whatif"), "aria-label": "What if the schedule were another one", title: "The step under another schedule, at the costs that were measured; the page Bubbles has more changes" });
      this.changeBox.addEventListener("change", () => {
        const schedule = this.changeBox.value;
        if (schedule !== "other") this.setChange(schedule ? `schedule=${encodeURIComponent(schedule)}` : "");
        this.canvas.focus({ preventScroll: true });
      });
      this.foundNote = make("span", { className: "note timeline-found", ...this.id("timeline-found"), role: "status" });
      this.criticalButton = this.button("Critical path", "The chain of ops that sets the step's length (C)", () => this.toggleCritical(), this.id("timeline-critical"));
      this.laneButton = this.button("Communication", "Lanes of communication below the ops (L)", () => this.toggleLanes(), this.id("timeline-lanes"));
      this.eventButton = this.button("Kernels", "Kernels, operators and calls by stream and thread, below each rank (E; below one: a click on its label)", () => this.toggleEvents(), this.id("timeline-events"));
      this.groupButton = this.button("", "Group rows (G)", () => this.regroup(), { ...this.id("timeline-order"), hidden: "" });
      this.measureButton = this.button("Measure", this.store.hasAnswers ? "Drag to measure a range and sum it by name (M, or Shift and drag; U: all that is shown)" : "Drag to measure a range (M, or Shift and drag)", () => this.toggleMeasure());
      const { hasAnswers } = this.store;
      const asking = (...tools) => (hasAnswers ? tools : []);
      const groups = [
        ...asking(make("div", { className: "segments", role: "group", "aria-label": "Sources on one axis" }, ...this.sourceButtons.values()), this.changeBox),
        make("div", { className: "tool-group" }, ...asking(this.criticalButton), this.laneButton, ...asking(this.eventButton), this.groupButton, this.measureButton),
        make("div", { className: "tool-group" }, this.button("−", "Zoom out (S)", () => this.zoom(1.5)), this.button("+", "Zoom in (W)", () => this.zoom(1 / 1.5)), (this.stepButton = this.button("Step", "Whole step (F)", () => this.goToStep(this.step))), this.button("Run", "Whole run (0)", () => this.show(0, this.about.span))),
        ...asking(make("div", { className: "tool-group" }, this.searchBox, this.words, this.foundNote)),
        make("div", { className: "tool-group right" }, this.button("PNG", "Save this view as PNG", () => this.savePng(), this.id("timeline-png")), this.button("SVG", "Save this view as SVG", () => this.saveSvg(), this.id("timeline-svg")), this.button("?", "Keys (?)", () => this.toggleHelp())),
      ];
      return make("div", { className: "timeline-tools" }, ...groups);
    }

    updateTools() {
      if (!this.about) return;
      for (const [source, button] of this.sourceButtons) {
        button.classList.toggle("on", this.sources.includes(source));
        button.setAttribute("aria-pressed", this.sources.includes(source));
        button.disabled = !this.about.sources.includes(source);
        if (button.disabled) button.title = source === "whatif" ? "Choose a change first" : "No plan of this run is known";
      }
      this.sourceButtons.get("whatif").hidden = !this.change;
      this.stepButton.disabled = !this.about.steps.length;
      this.fillChanges();
      for (const [button, isOn] of [[this.criticalButton, this.isCritical], [this.laneButton, this.showLanes], [this.eventButton, this.withEvents.size], [this.measureButton, this.isMeasuring]]) {
        button.classList.toggle("on", Boolean(isOn));
        button.setAttribute("aria-pressed", Boolean(isOn));
      }
      this.laneButton.hidden = !this.about.numBars.comms && !this.haveMemory.size;
      this.eventButton.disabled = !this.haveEvents.size;
      if (!this.haveEvents.size) this.eventButton.title = "These files list no kernels or operators";
      this.groupButton.textContent = `By ${this.order}`;
      this.groupButton.hidden = this.about.ranks.length <= 16 && this.about.orders.pipeline.length === 1;
      this.fillLegend();
    }

    fillChanges() {
      const { schedules, noWhatif } = this.about;
      this.changeBox.disabled = !schedules.length;
      if (noWhatif) this.changeBox.title = noWhatif;
      const fields = this.change ? this.change.fields : "";
      const plain = new URLSearchParams(fields);
      const schedule = [...plain.keys()].join() === "schedule" ? plain.get("schedule") : "";
      const options = schedules.map((name) => make("option", { value: name, text: `What if ${name}` }));
      const other = this.change && !schedule ? [make("option", { value: "other", text: `What if ${this.change.name}` })] : [];
      this.changeBox.replaceChildren(make("option", { value: "", text: "What if …" }), ...other, ...options);
      this.changeBox.value = other.length ? "other" : schedule;
    }

    fillLegend() {
      const chip = (colour, state) => {
        const made = make("span", { className: "legend-chip" });
        made.style.background = state ? `repeating-linear-gradient(${T.isUp(state) ? "-" : ""}45deg, ${colour} 0 1px, transparent 1px 4px)` : colour;
        return made;
      };
      const words = this.legendEntries().map(([text]) => text).filter((text) => text !== "Memory"); // which has no bars
      this.words.replaceChildren(...words.map((value) => make("option", { value })));
      this.legendBox.replaceChildren(...this.legendLooks().map(([text, ...look]) => make("span", { className: "legend-entry" }, chip(...look), text)));
    }

    /* The entries of the legend, those of one look, as compute and its kernels, together. */
    legendLooks() {
      const looks = [];
      for (const [text, ...look] of this.legendEntries()) {
        const same = looks.find(([, ...other]) => String(other) === String(look));
        if (same) same[0] += `, ${text}`;
        else looks.push([text, ...look]);
      }
      return looks;
    }

    /* [text, colour, state that is hatched] of what is drawn. */
    legendEntries() {
      const { about } = this;
      const seen = [...about.tables.ops.texts.kind, ...(this.change ? this.change.kinds : [])];
      const kinds = Object.keys(about.palette).filter((kind) => kind !== "STEP" && seen.includes(kind));
      const place = (kind) => (about.opClasses.includes(kind) ? about.opClasses.indexOf(kind) : about.opClasses.length);
      const names = kinds.sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
      const entries = names.map((kind) => [about.kindNames[kind] || kind, about.palette[kind][0][0]]);
      if (about.numBars.comms) entries.push(["Transfer", about.colours.transfer], ["Waiting", T.WAIT_COLOUR]);
      if (about.hasUnmatched) entries.push(["Waiting or transfer, not known which", about.colours.either]);
      if (about.mostBytes) entries.push(["Memory", about.colours.memory]);
      entries.push(...this.eventEntries());
      for (const phase of about.phases) entries.push([phase, T.PHASE_COLOURS[phase].replace(/0\.\d+\)/, "0.4)")]);
      const isSaid = (state) => state === "waiting or transfer" && about.hasUnmatched; // looks as it does in a lane
      for (const state of about.causes) if (!isSaid(state)) entries.push([state, ...T.stateLook(state)]);
      return entries;
    }

    say(text) {
      this.message.textContent = text;
      this.message.hidden = !text;
    }

    toggleLanes() {
      this.showLanes = !this.showLanes;
      this.changed();
    }

    toggleMeasure() {
      this.isMeasuring = !this.isMeasuring;
      if (!this.isMeasuring) this.unsum();
      this.updateTools();
      this.redraw();
    }

    toggleHelp() {
      this.help.hidden = !this.help.hidden;
    }

    save(content, name) {
      const link = make("a", { href: URL.createObjectURL(content), download: name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    }

    savePng() {
      const size = this.size();
      const places = T.legendPlaces(this.legendLooks(), size.width);
      const ratio = this.canvas.width / size.width;
      const picture = make("canvas", { width: this.canvas.width, height: this.canvas.height + Math.round(T.legendHeight(places) * ratio) });
      const pen = picture.getContext("2d");
      pen.drawImage(this.canvas, 0, 0);
      pen.scale(ratio, ratio);
      T.drawLegend(pen, places, this.canvas.height / ratio, size.width, this.marks().colours);
      picture.toBlob((content) => this.save(content, "pptrace-timeline.png"));
    }

    svg() {
      const size = this.size();
      const places = T.legendPlaces(this.legendLooks(), size.width);
      const ctx = new T.SvgContext(size.width, size.height + T.legendHeight(places), `12px ${T.FONT}`);
      T.draw(ctx, this, size, this.marks());
      T.drawLegend(ctx, places, size.height, size.width, this.marks().colours);
      return ctx.toString();
    }

    saveSvg() {
      this.save(new Blob([this.svg()], { type: "image/svg+xml" }), "pptrace-timeline.svg");
    }

    /* Mouse and keys */

    pointer(event) {
      const box = this.canvas.getBoundingClientRect();
      return [((event.clientX - box.left) / box.width) * this.size().width, (event.clientY - box.top) / this.scale];
    }

    listen() {
      const { canvas } = this;
      if (!this.isWholePage) canvas.style.touchAction = "pan-y"; // a swipe goes on in the page
      canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
      canvas.addEventListener("pointerdown", (event) => this.onDown(event));
      canvas.addEventListener("pointermove", (event) => this.onMove(event));
      canvas.addEventListener("pointerup", (event) => this.onUp(event));
      canvas.addEventListener("pointerleave", () => {
        this.pointed = null;
        this.lastY = undefined;
        this.hideTip();
      });
      canvas.addEventListener("dblclick", (event) => this.onDouble(event));
      const jump = (event) => {
        if (event.buttons !== 1) return;
        const box = this.mini.getBoundingClientRect();
        const middle = ((event.clientX - box.left) / box.width) * this.about.span;
        this.show(middle - (this.t1 - this.t0) / 2, middle + (this.t1 - this.t0) / 2);
      };
      this.mini.addEventListener("pointerdown", jump);
      this.mini.addEventListener("pointermove", jump);
      this.observer = new ResizeObserver(() => (this.isShown() ? this.redraw() : stop()));
      this.observer.observe(this.box);
      this.observer.observe(document.body); // what stands above may come and go: the timeline takes the room that is left
      const dark = matchMedia("screen and (prefers-color-scheme: dark)");
      const recolour = () => {
        if (!this.isShown()) return stop();
        this.palette = T.colours(this.root);
        if (this.isReady) this.draw(); // at once: it may be for a page that is printed
      };
      const stop = () => {
        this.observer.disconnect();
        dark.removeEventListener("change", recolour);
      };
      dark.addEventListener("change", recolour);
    }

    isShown() {
      return this.root.isConnected && this.root.timeline === this;
    }

    /* In a page that has more than the timeline, the wheel is the page's until the timeline was clicked. */
    onWheel(event) {
      if (!this.isWholePage && !event.ctrlKey && !event.shiftKey && document.activeElement !== this.canvas) return;
      event.preventDefault();
      if (!this.isReady) return;
      const [x, y] = this.pointer(event);
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move((event.deltaX || event.deltaY) / 1200);
      else if (x < this.left || event.altKey) this.scrollBy(event.deltaY);
      else this.zoom(Math.exp(event.deltaY * 0.0016), x);
    }

    scrollBy(by) {
      this.hideTip();
      this.scroll = Math.min(Math.max(this.scroll + by, 0), this.mostScroll);
      this.redraw();
      this.write();
    }

    onDown(event) {
      if (event.button !== 0 || !this.isReady) return;
      const [x, y] = this.pointer(event);
      this.canvas.setPointerCapture(event.pointerId);
      const isMeasure = this.isMeasuring || event.shiftKey;
      this.grip = { x, y, t0: this.t0, t1: this.t1, scroll: this.scroll, moved: false, isMeasure, time: this.timeAt(x) };
    }

    onMove(event) {
      if (!this.isReady) return;
      const [x, y] = this.pointer(event);
      const { grip } = this;
      if (!grip) return this.hover(event);
      if (!grip.moved && Math.hypot(x - grip.x, y - grip.y) < 4) return;
      grip.moved = true;
      this.tip.hidden = true;
      if (grip.isMeasure) {
        this.measured = [grip.time, this.timeAt(x)];
        this.measured.ranks = this.ranksBetween(grip.y, y);
        this.redraw();
        return;
      }
      const by = ((grip.x - x) / (this.right - this.left)) * (grip.t1 - grip.t0);
      this.scroll = Math.min(Math.max(grip.scroll + grip.y - y, 0), this.mostScroll);
      this.show(grip.t0 + by, grip.t1 + by);
    }

    onUp(event) {
      const { grip } = this;
      this.grip = null;
      if (grip && grip.moved && grip.isMeasure) this.sum(this.measured, this.ranksBetween(grip.y, this.pointer(event)[1]));
      if (!grip || grip.moved) return;
      const [x, y] = this.pointer(event);
      if (y < T.AXIS) {
        const step = this.stepAt(this.timeAt(x));
        if (step && x > this.left) this.goToStep(step[0]);
        return;
      }
      const group = this.groupAt(x, y);
      if (group) return this.toggleGroup(group.index);
      const row = x < this.left && this.rowAt(y);
      if (row && row.type === "rank") return T.isOnToggle(this, row, x, y) ? this.toggleEvents(row.at) : this.pinRow(row.at);
      this.hideTip();
      this.choose(this.barAt(x, y));
      this.canvas.focus({ preventScroll: true });
    }

    onDouble(event) {
      const hit = this.barAt(...this.pointer(event));
      const middle = hit && hit.start + hit.part.shift;
      if (hit && hit.cell === undefined) this.show(middle - hit.length, middle + 2 * hit.length);
      else this.zoom(0.2, this.pointer(event)[0]);
    }

    onKey(event) {
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
      const actions = {
        w: () => this.zoom(1 / 1.4), s: () => this.zoom(1.4), a: () => this.move(-0.2), d: () => this.move(0.2),
        ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), ArrowUp: () => this.scrollBy(-60), ArrowDown: () => this.scrollBy(60),
        f: () => this.goToStep(this.step), 0: () => this.show(0, this.about.span), n: () => this.neighbourStep(1), p: () => this.neighbourStep(-1),
        c: () => this.toggleCritical(), l: () => this.toggleLanes(), e: () => this.toggleEvents(this.pointedRank()), g: () => this.regroup(), m: () => this.toggleMeasure(), u: () => this.sumAll(),
        j: () => this.selectFound(), o: () => this.toggleGroups(), k: () => this.keep(this.target()), r: () => this.pinTarget(), x: () => this.toggleAlignment(this.target()),
        1: () => this.toggleSource("planned"), 2: () => this.toggleSource("simulated"), 3: () => this.toggleSource("measured"), 4: () => this.toggleSource("whatif"),
        "+": () => this.scaleRows(1.2), "-": () => this.scaleRows(1 / 1.2), "/": () => this.searchBox.focus(), "?": () => this.toggleHelp(), Escape: () => this.escape(),
      };
      if (!this.isReady || event.ctrlKey || event.metaKey || event.altKey || !actions[key] || (!this.store.hasAnswers && ASK.includes(key))) return;
      event.preventDefault();
      actions[key]();
    }
  }

  T.Timeline = Timeline;

  /* Dash: the step that was chosen in the page's header. That of an address comes with the choices, maybe late: the timeline has read it. */
  const chooseStep = (value) => {
    const isOfAddress = window.dash_clientside.callback_context.triggered.some(({ prop_id: changed }) => changed === "step.options");
    const isChosen = T.dropdown !== value && !isOfAddress;
    T.dropdown = value;
    const { current } = T;
    if (typeof value === "number" && current && current.isWholePage && current.isReady && current.root.isConnected && current.step !== value) {
      if (isChosen) current.goToStep(value);
      else if (location.pathname === "/timeline") current.tellStep();
    }
    return window.dash_clientside.no_update;
  };
  window.dash_clientside = Object.assign({}, window.dash_clientside, { pptraceTimeline: { chooseStep } });

  const mount = () => {
    for (const root of document.querySelectorAll(".timeline")) if (!root.timeline) T.current = new Timeline(root);
  };
  new MutationObserver((changes) => {
    for (const { type, target } of changes) if (type === "attributes") delete target.timeline; // it is another one now
    mount();
  }).observe(document, { subtree: true, childList: true, attributes: true, attributeFilter: ["data-view", "data-tiles"] });
  document.addEventListener("pointerdown", (event) => {
    T.current = event.target.closest(".timeline")?.timeline || T.current;
  });
  document.addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName) || event.target.isContentEditable;
    const own = event.target.closest(".timeline")?.timeline;
    const isElsewhere = event.target !== document.body && !event.target.closest("#page, header nav a"); // the link that led here keeps the focus
    if (own) T.current = own;
    if (!isTyping && T.current?.root.isConnected && (own || (T.current.isWholePage && !isElsewhere))) T.current.onKey(event);
  });
})();
