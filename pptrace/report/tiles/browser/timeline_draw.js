/* Draws the timeline: rows of ranks and groups, bars, cells where bars are too short to be seen, and what is marked over them. */
(() => {
  const T = (window.pptraceTimeline = window.pptraceTimeline || {});
  const FONT = '"Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif';
  const PHASES = { warmup: "rgba(70, 130, 200, 0.13)", steady: "rgba(128, 134, 145, 0.05)", cooldown: "rgba(225, 130, 50, 0.13)" };
  const STATES = {
    "exposed transfer": { solid: "rgba(169, 70, 127, 0.6)" },
    "waiting or transfer": { solid: "#7B8491" },
    "other work": { solid: "rgba(44, 122, 140, 0.45)" },
    "not launched": { colour: "#56708F", up: true },
    fill: { colour: "#8D97A5", up: true },
    drain: { colour: "#8D97A5", up: false },
    "late message": { colour: "#A9467F", up: true },
    "late collective": { colour: "#7A4FA3", up: false },
    "other order": { colour: "#B0702E", up: false },
    idle: { colour: "#A9467F", up: true },
    unexplained: { colour: "#C9A558", up: false, ground: "rgba(201, 165, 88, 0.13)" },
  }; // looks of what a rank does when it computes in no op: filled, or hatched
  const WAIT = "rgba(128, 134, 145, 0.55)";
  const GAP_ALPHA = 0.8;
  const PALE = 0.35; // of what is hatched, where it is too narrow for that
  const CLASSES = 9; // of a table's bars, as tiles have them
  const LEAST_FRAMED = 5; // px of a hit that has a frame
  const MOST_STRIPS = 150;
  const MOST_ARROWS = 500;
  const COMPUTE = 0;
  T.AXIS = 44;
  const LANE_FONT = 9; // px of a lane's name
  const LANE_COLUMN = 44; // px from one column of lanes' names to the next
  T.FONT = FONT;

  T.colours = (root) => {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    return { panel: of("--panel"), line: of("--line"), text: of("--text"), soft: of("--soft"), accent: of("--accent"), accentFill: of("--accent-fill"), bad: of("--bad"), ground: of("--ground") };
  };

  /* How much larger than on screens of usual width everything is. */
  T.scale = () => parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--scale")) || 1;

  /* Hatched ground of idle time; drain leans the other way than fill. */
  const hatches = new Map();
  const hatch = (ctx, state, paper) => {
    const key = state + paper;
    if (!hatches.has(key)) {
      const { colour, up, ground } = STATES[state] || STATES.unexplained;
      const canvas = document.createElement("canvas");
      canvas.width = canvas.height = 6;
      const pen = canvas.getContext("2d");
      if (ground) {
        pen.fillStyle = ground;
        pen.fillRect(0, 0, 6, 6);
      }
      pen.strokeStyle = colour;
      pen.globalAlpha = 0.8;
      pen.lineWidth = ground ? 0.8 : 1.2;
      for (const shift of [-6, 0, 6]) drawLine(pen, shift - 1, up ? 7 : -1, shift + 7, up ? -1 : 7);
      const id = state.replace(/[^a-z]+/g, "-");
      hatches.set(key, { pattern: pen.createPattern(canvas, "repeat"), hatch: { id, colour, ground: ground || "none", up } });
    }
    const { pattern, hatch } = hatches.get(key);
    return ctx instanceof T.SvgContext ? { hatch } : pattern;
  };

  /* The colour of a state where nothing can be hatched. */
  const paleOf = (state) => {
    const { solid, colour } = STATES[state] || STATES.unexplained;
    return solid || `rgba(${[1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)).join(", ")}, ${PALE})`;
  };

  /* The cells of a section as a picture: a column for each bucket, for each track that has any some rows, which its classes' shares
     fill from below, or from above. Pictures of tiles that were not drawn lately are given up. */
  const made = new Set();
  const strip = (section, colours, levels, isFromAbove) => {
    if (!section.cellTrack.length) return null;
    made.delete(section);
    made.add(section);
    if (section.strip) return section.strip;
    if (made.size > MOST_STRIPS) {
      const oldest = made.values().next().value;
      made.delete(oldest);
      oldest.strip = null;
    }
    const rowOf = new Int32Array(section.rank.length).fill(-1);
    let numRows = 0;
    for (const track of section.cellTrack) if (rowOf[track] < 0) rowOf[track] = numRows++;
    const canvas = document.createElement("canvas");
    canvas.width = 1024;
    canvas.height = numRows * levels;
    const pen = canvas.getContext("2d");
    const image = pen.createImageData(canvas.width, canvas.height);
    const pixels = new Uint32Array(image.data.buffer);
    for (let cell = 0; cell < section.cellTrack.length; cell += 1) {
      const row = rowOf[section.cellTrack[cell]];
      const [first, step] = isFromAbove ? [row * levels, 1] : [(row + 1) * levels - 1, -1];
      const bucket = section.cellBucket[cell];
      let filled = 0;
      let level = 0;
      for (let group = 0; group < CLASSES; group += 1) {
        const share = section.cellShares[cell * CLASSES + group];
        if (!share) continue;
        filled += share;
        const top = Math.min(Math.max(Math.round((filled / 255) * levels), level + (level < levels - 1 ? 1 : 0)), levels);
        for (; level < top; level += 1) pixels[(first + step * level) * 1024 + bucket] = colours[group];
      }
    }
    pen.putImageData(image, 0, 0);
    return (section.strip = { canvas, rowOf });
  };

  const drawLine = (ctx, x0, y0, x1, y1) => {
    ctx.beginPath();
    ctx.moveTo(x0, y0);
    ctx.lineTo(x1, y1);
    ctx.stroke();
  };

  /* Texts that follow have their middle where they are written. */
  const centre = (ctx, font) => Object.assign(ctx, { textAlign: "center", textBaseline: "middle", font });

  const packed = new Map();
  const pack = (colour) => {
    if (!packed.has(colour)) {
      const pen = document.createElement("canvas").getContext("2d");
      pen.fillStyle = colour;
      pen.fillRect(0, 0, 1, 1);
      packed.set(colour, new Uint32Array(pen.getImageData(0, 0, 1, 1).data.buffer)[0]);
    }
    return packed.get(colour);
  };

  T.kindColour = (about, kind, chunk) => {
    const shades = about.palette[kind] || about.palette.OTHER || [[about.colours.other, "#fff"]];
    return shades[Math.min(Math.max(chunk, 0), shades.length - 1)];
  };

  /* One drawing of a view, the timeline's state. */
  T.draw = (ctx, view, size, marks) => {
    const c = marks.colours;
    ctx.save();
    ctx.fillStyle = c.panel;
    ctx.fillRect(0, 0, size.width, size.height);
    const shown = { comms: [], crossing: new Set(), numbered: [] };
    inRowsOf(ctx, view, size, view.left, () => {
      drawStepEdges(ctx, view, size, c);
      for (const part of view.drawn) drawPart(ctx, shifted(view, part.shift), part, c, shown);
      drawNumbers(ctx, shown.numbered.splice(0));
    });
    ctx.save();
    ctx.beginPath();
    ctx.rect(view.left, T.AXIS, size.width - view.left, size.height - T.AXIS);
    ctx.clip();
    drawArrows(ctx, view, shown.comms);
    if (marks.critical) drawCritical(ctx, view, marks.critical, c);
    if (marks.journey) drawJourney(ctx, view, size, marks.journey, c);
    if (marks.found) drawFound(ctx, view, marks.found, c);
    drawKept(ctx, view, marks, c);
    if (marks.alignment) drawAlignment(ctx, view, size, marks.alignment, c);
    if (marks.measure) drawMeasure(ctx, view, size, marks.measure, c);
    ctx.restore();
    drawLabels(ctx, view, size, c, marks);
    drawAxis(ctx, view, size, c);
    ctx.restore();
  };

  /* Draws rows twice: those that scroll, below the pinned ones, then these. */
  const inRowsOf = (ctx, view, size, left, paint) => {
    for (const isPinned of view.pinHeight ? [false, true] : [false]) {
      const top = T.AXIS + (isPinned ? 0 : view.pinHeight);
      const bottom = isPinned ? T.AXIS + view.pinHeight : size.height;
      ctx.save();
      ctx.beginPath();
      ctx.rect(left, top, size.width - left, bottom - top);
      ctx.clip();
      view.pinnedPass = isPinned;
      paint();
      view.pinnedPass = null;
      ctx.restore();
    }
  };

  /* The view as a rank sees it that is drawn this much later. */
  const shifted = (view, shift) => (shift ? Object.create(view, { t0: { value: view.t0 - shift }, t1: { value: view.t1 - shift } }) : view);

  const drawStepEdges = (ctx, view, size, c) => {
    if (view.alignment) return; // each rank has them elsewhere
    ctx.fillStyle = c.line;
    for (const [, begin, end] of view.about.steps) {
      for (const time of [begin, end]) {
        const x = view.x(time);
        if (x >= view.left && x <= size.width) ctx.fillRect(Math.round(x), T.AXIS, 1, size.height);
      }
    }
  };

  const drawPart = (ctx, view, part, c, shown) => {
    const { sections, clip, type } = part;
    const from = Math.max(view.x(clip[0]), view.left);
    const to = view.x(clip[1]);
    if (to <= from) return;
    if (type === "groups") return drawGroups(ctx, view, part);
    if (type === "memory") return drawMemory(ctx, view, part);
    if (part.isStandIn) {
      ctx.save();
      ctx.beginPath();
      ctx.rect(from, T.AXIS, to - from, 1e5);
      ctx.clip();
    }
    if (type === "events") T.drawEvents(ctx, view, part, places(sections.events, "events", part), shown, { blit, eachBar, pack });
    else drawTile(ctx, view, sections, part, c, shown);
    if (part.isStandIn) ctx.restore();
  };

  const drawTile = (ctx, view, sections, part, c, shown) => {
    drawBack(ctx, view, sections.back, part, c, shown);
    drawOps(ctx, view, sections.ops, part, shown);
    drawGaps(ctx, view, sections.back, part, c, shown);
    drawComms(ctx, view, sections.comms, part, shown);
  };

  /* Where each track of a section is: [top, height], null where it is not seen. */
  const places = (section, table, part) =>
    section.rank.map((at, index) => part.placeOf(table, at, section.lane[index], section.depth[index]));

  /* Draws rows of a tile's picture, each a number of levels high, in [spot, row], as far as they are seen. */
  const drawRows = (ctx, view, part, canvas, levels, rows) => {
    const { begin, end } = part.time;
    const x0 = view.x(begin);
    const width = view.x(end) - x0;
    const [from, to] = part.clip.map((time) => (time - begin) / (end - begin));
    const sx = Math.max(0, Math.floor(Math.max((view.left - x0) / width, from) * 1024));
    const sw = Math.min(1024, Math.ceil(Math.min((view.right - x0) / width, to) * 1024)) - sx;
    if (sw <= 0) return;
    ctx.imageSmoothingEnabled = false;
    for (const [spot, row] of rows) {
      if (spot && row >= 0) ctx.drawImage(canvas, sx, row * levels, sw, levels, x0 + (sx / 1024) * width, spot[0], (sw / 1024) * width, spot[1]);
    }
  };

  const blit = (ctx, view, section, part, spots, colours, levels, isFromAbove = false) => {
    const image = strip(section, colours, levels, isFromAbove);
    if (image) drawRows(ctx, view, part, image.canvas, levels, spots.map((spot, track) => [spot, image.rowOf[track]]));
  };

  /* The bars of each rank of a section, found once. */
  const barsOf = (section, only) => {
    if (!section.byRank) {
      section.byRank = new Map();
      section.track.forEach((track, bar) => {
        const at = section.rank[track];
        if (!section.byRank.has(at)) section.byRank.set(at, []);
        section.byRank.get(at).push(bar);
      });
    }
    return section.byRank.get(only) || [];
  };

  /* A bar that lies in several tiles is in all of them, and drawn with the first: drawn again it would be darker, and would hide
     the gaps in it. Stand-ins are clipped to their own time. */
  const isDrawn = ({ source, time, isStandIn, only }, table, row, begin, end, shown) => {
    if (isStandIn || (begin >= time.begin && end <= time.end)) return false;
    const name = `${source} ${table} ${only ?? ""} ${row}`;
    if (shown.crossing.has(name)) return true;
    shown.crossing.add(name);
    return false;
  };

  const eachBar = (view, part, table, spots, shown, visit) => {
    const section = part.sections[table];
    const { start, length, track, row } = section;
    const [t0, t1] = [view.t0, view.t1];
    const bars = part.only === undefined ? null : barsOf(section, part.only);
    const count = bars ? bars.length : start.length;
    for (let index = 0; index < count; index += 1) {
      const bar = bars ? bars[index] : index;
      const spot = spots[track[bar]];
      if (!spot || start[bar] > t1 || start[bar] + length[bar] < t0) continue;
      if (isDrawn(part, table, row[bar], start[bar], start[bar] + length[bar], shown)) continue;
      const x = Math.max(view.x(start[bar]), view.left - 4);
      const end = Math.min(view.x(start[bar] + length[bar]), view.right + 4);
      visit(bar, x, Math.max(end - x, 0), spot);
    }
  };

  const drawBack = (ctx, view, section, part, c, shown) => {
    const texts = view.about.tables.back.texts;
    const spots = places(section, "back", part);
    const rowSpots = section.rank.map((at, index) => (section.lane[index] === 0 ? part.rowOf(at) : null));
    eachBar(view, part, "back", rowSpots, shown, (bar, x, width, spot) => {
      ctx.fillStyle = PHASES[texts.phases[section.group[bar]]];
      ctx.fillRect(x, spot[0], width, spot[1]);
    });
    const bubbles = spots.map((spot, index) => (section.lane[index] === 1 ? spot : null));
    blit(ctx, view, section, part, bubbles, texts.bubbles.map((state) => pack(paleOf(state))), 8, true); // ops fill from below
    eachBar(view, part, "back", bubbles, shown, (bar, x, width, spot) => fillState(ctx, texts.bubbles[section.group[bar]], x, width, spot, c));
  };

  /* Hatched where it is wide enough for that, else pale. */
  const fillState = (ctx, state, x, width, spot, c) => {
    ctx.fillStyle = width < 3 || STATES[state].solid ? paleOf(state) : hatch(ctx, state, c.panel);
    ctx.fillRect(x, spot[0], width, spot[1]);
  };

  /* Time in ops without compute: the op is pale there, and looks like the same state between ops. */
  const drawGaps = (ctx, view, section, part, c, shown) => {
    const texts = view.about.tables.back.texts;
    const spots = places(section, "back", part).map((spot, index) => (section.lane[index] === 2 && spot ? [spot[0] + 1, spot[1] - 2] : null));
    if (!spots.some(Boolean)) return;
    eachBar(view, part, "back", spots, shown, (bar, x, width, spot) => {
      if (width < 1) return;
      ctx.globalAlpha = GAP_ALPHA;
      ctx.fillStyle = c.panel;
      ctx.fillRect(x, spot[0], width, spot[1]);
      ctx.globalAlpha = 1;
      fillState(ctx, texts.gaps[section.group[bar]], x, width, spot, c);
    });
  };

  /* Draw ops; those with room for their number are kept as [text, size, middle, spot, fill, ink]. */
  const drawOps = (ctx, view, section, part, shown) => {
    const about = view.about;
    const spots = places(section, "ops", part);
    const classes = about.opClasses.map((kind) => pack(T.kindColour(about, kind, 0)[0] || about.colours.other));
    blit(ctx, view, section, part, spots, classes, 8);
    const kinds = part.texts.kind;
    let last = "";
    eachBar(view, part, "ops", spots, shown, (bar, x, width, spot) => {
      const [fill, ink] = T.kindColour(about, kinds[section.kind[bar]], section.chunk[bar]);
      if (fill !== last) ctx.fillStyle = last = fill;
      const drawn = width > 4 ? width - 1 : Math.max(width, 0.7);
      ctx.fillRect(x, spot[0], drawn, spot[1]);
      if (width <= 14 || spot[1] <= 10) return;
      const text = section.microbatch[bar] >= 0 ? String(section.microbatch[bar]) : kinds[section.kind[bar]];
      const size = Math.min(12, spot[1] - 2);
      if (width >= text.length * size * 0.6 + 5) shown.numbered.push([text, size, x + width / 2, spot, fill, ink]);
    });
  };

  /* Numbers of microbatches over their ops and what gaps these have, on a ground of the op's own colour. */
  const drawNumbers = (ctx, numbered) => {
    for (const [text, size, x, spot, fill, ink] of numbered) {
      const [y, wide] = [spot[0] + spot[1] / 2, text.length * size * 0.6 + 4];
      ctx.fillStyle = fill;
      ctx.fillRect(x - wide / 2, y - size / 2 - 1, wide, size + 2);
      centre(ctx, `${size}px ${FONT}`);
      ctx.fillStyle = ink;
      ctx.fillText(text, x, y + 0.5);
    }
  };

  const drawComms = (ctx, view, section, part, shown) => {
    const spots = places(section, "comms", part);
    if (!spots.some(Boolean)) return;
    const { transfer, either } = view.about.colours;
    const classes = [pack(WAIT), pack(transfer), pack(either)];
    blit(ctx, view, section, part, spots, classes, 3);
    eachBar(view, part, "comms", spots, shown, (bar, x, width, spot) => {
      ctx.fillStyle = WAIT;
      ctx.fillRect(x, spot[0], Math.max(width, 0.7), spot[1]);
      const moves = [view.x(section.start[bar] + section.before[bar]), view.x(section.start[bar] + section.length[bar] - section.after[bar])];
      const from = Math.max(moves[0], view.left - 4);
      ctx.fillStyle = section.match[bar] < 0 ? either : transfer;
      ctx.fillRect(from, spot[0], Math.max(Math.min(moves[1], view.right + 4) - from, 0.7), spot[1]);
      const lane = section.lane[section.track[bar]];
      if (lane <= 1 && section.match[bar] >= 0) shown.comms.push([section.match[bar], lane, moves, spot]);
    });
  };

  /* A line from each send to its receive, when they are few enough to be followed. */
  const drawArrows = (ctx, view, comms) => {
    if (!view.showLanes || comms.length > MOST_ARROWS || view.alignment) return;
    const sends = new Map();
    for (const [match, lane, [begins], spot] of comms) if (lane === 1) sends.set(match, [begins, spot[0] + spot[1]]);
    ctx.strokeStyle = view.about.colours.transfer;
    ctx.fillStyle = view.about.colours.transfer;
    ctx.globalAlpha = 0.75;
    ctx.lineWidth = 1;
    for (const [match, lane, [, x], spot] of comms) {
      const from = sends.get(match);
      if (lane !== 0 || !from) continue;
      const y = spot[0] + (from[1] < spot[0] ? 0 : spot[1]);
      if (x - from[0] > 4 * (view.right - view.left)) continue;
      const bend = Math.max((x - from[0]) / 2, 6);
      ctx.beginPath();
      ctx.moveTo(from[0], from[1]);
      ctx.bezierCurveTo(from[0] + bend, from[1], x - bend, y, x, y);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(x + 1, y);
      ctx.lineTo(x - 5, y - 3);
      ctx.lineTo(x - 5, y + 3);
      ctx.closePath();
      ctx.fill();
    }
    ctx.globalAlpha = 1;
  };

  const drawCritical = (ctx, view, ops, c) => {
    ctx.strokeStyle = c.bad;
    ctx.lineWidth = 2;
    let before = null;
    for (const [at, start, length] of ops) {
      const spot = view.placeOf("measured", "ops", at, COMPUTE, 0);
      const begin = start + view.shiftOf(at);
      const here = spot && [view.x(begin), view.x(begin + length), spot[0] + spot[1] / 2];
      if (here && here[1] >= view.left && here[0] <= view.right) {
        ctx.strokeRect(here[0] + 0.5, spot[0] + 0.5, Math.max(here[1] - here[0] - 2, 1), spot[1] - 1);
      }
      if (before && here && here[1] >= view.left && before[1] <= view.right) drawLine(ctx, before[1] - 1, before[2], here[0] + 1, here[2]);
      before = here;
    }
  };

  /* All else becomes pale, and every hop of the microbatch is drawn again, joined in the order of time. */
  const drawJourney = (ctx, view, size, journey, c) => {
    ctx.globalAlpha = 0.72;
    ctx.fillStyle = c.panel;
    ctx.fillRect(view.left, T.AXIS, size.width, size.height);
    ctx.globalAlpha = 1;
    let before = null;
    const joints = [];
    const drawn = [];
    for (const hop of journey.hops) {
      const isComm = hop.table === "comms";
      const lane = isComm ? (hop.what === "send" ? 1 : 0) : COMPUTE;
      const spot = view.placeOf(journey.source, hop.table, hop.at, lane, hop.depth);
      if (!spot) continue;
      const shift = view.shiftOf(hop.at);
      const x = view.x(hop.start_ns + shift);
      const width = Math.max(view.x(hop.end_ns + shift) - x, 1.5);
      ctx.fillStyle = isComm ? WAIT : T.kindColour(view.about, hop.what, 0)[0];
      if (x + width >= view.left && x <= view.right) {
        ctx.fillRect(x, spot[0], width, spot[1]);
        if (isComm) {
          ctx.fillStyle = view.about.colours.transfer;
          const from = view.x(hop.start_ns + hop.before_ns + shift);
          ctx.fillRect(from, spot[0], Math.max(view.x(hop.start_ns + hop.before_ns + hop.transfer_ns + shift) - from, 1.5), spot[1]);
        }
        if (!isComm && width > 16) {
          centre(ctx, `600 ${Math.min(12, spot[1] - 1)}px ${FONT}`);
          ctx.fillStyle = T.kindColour(view.about, hop.what, 0)[1];
          ctx.fillText(String(journey.microbatch), x + width / 2, spot[0] + spot[1] / 2 + 0.5);
        }
        drawn.push({ hop, isComm, x, y: spot[0], width, height: spot[1] });
        if (hop === journey.focus) {
          ctx.strokeStyle = c.text;
          ctx.lineWidth = 2;
          ctx.strokeRect(x - 1, spot[0] - 1, width + 2, spot[1] + 2);
        }
      }
      if (!isComm) {
        const y = spot[0] + spot[1] / 2;
        if (before) joints.push([...before, x, y]);
        before = [x + width, y];
      }
    }
    ctx.strokeStyle = c.text;
    ctx.lineWidth = 1.4;
    ctx.setLineDash([3, 3]);
    for (const joint of joints) drawLine(ctx, ...joint);
    ctx.setLineDash([]);
    drawDeviations(ctx, view, drawn, c);
  };

  /* How much later than in the plan each hop of a journey is, where there is room for it: ops first, which most look for. */
  const drawDeviations = (ctx, view, drawn, c) => {
    const taken = drawn.map(({ x, y, width, height }) => [x, y, x + width, y + height]);
    const isFree = ([x0, y0, x1, y1]) => x0 >= view.left && x1 <= view.right && y0 >= T.AXIS && taken.every(([a, b, d, e]) => x1 <= a || d <= x0 || y1 <= b || e <= y0);
    centre(ctx, `600 11px ${FONT}`);
    for (const { hop, x, y, width, height } of [...drawn].sort((one, other) => one.isComm - other.isComm)) {
      if (hop.late_ns === null) continue;
      const text = T.deviation(hop.late_ns);
      const wide = ctx.measureText(text).width + 6;
      const [middle, high] = [Math.min(Math.max(x + width / 2, view.left + wide / 2), view.right - wide / 2), 13];
      const [left, right, top] = [Math.max(x, view.left), x + width, y + height / 2 - high / 2];
      const box = [
        [middle - wide / 2, y + height], [right + 1, top], [left - wide - 1, top], [middle - wide / 2, y - high - 4],
      ].map(([a, b]) => [a, b, a + wide, b + high]).find(isFree);
      if (!box) continue;
      taken.push(box);
      ctx.globalAlpha = 0.85;
      ctx.fillStyle = c.panel;
      ctx.fillRect(box[0], box[1], wide, high);
      ctx.globalAlpha = 1;
      ctx.fillStyle = hop.late_ns > 0 ? c.bad : c.soft;
      ctx.fillText(text, box[0] + wide / 2, box[1] + high / 2 + 0.5);
    }
  };

  const drawFound = (ctx, view, { bars, index }, c) => {
    const current = bars[index];
    const frame = ([at, start, length, table, lane, depth], colour, width, alpha) => {
      const spot = view.placeOf("measured", table, at, lane, depth);
      const begin = start + view.shiftOf(at);
      if (!spot || begin > view.t1 || begin + length < view.t0) return;
      const x = view.x(begin);
      const wide = view.x(begin + length) - x;
      Object.assign(ctx, { strokeStyle: colour, fillStyle: colour, lineWidth: width, globalAlpha: alpha });
      if (alpha < 1 && wide < LEAST_FRAMED) ctx.fillRect(x, spot[0] - 2, Math.max(wide, 1.5), 4); // frames of many would hide them
      else ctx.strokeRect(x - 1, spot[0] - 1, Math.max(wide, 2) + 2, spot[1] + 2);
    };
    for (const bar of bars) if (bar !== current) frame(bar, c.text, 1.5, 0.75);
    if (current) frame(current, c.ground, 6, 1); // around the one that is gone to, so that it stands out among many
    if (current) frame(current, c.text, 3, 1);
    ctx.globalAlpha = 1;
  };

  /* A frame around the bar that was clicked and around those whose details are kept, with the numbers of their cards. */
  const drawKept = (ctx, view, { chosen, kept }, c) => {
    [...kept.map((bar, index) => [bar, String(index + 1)]), ...(chosen ? [[chosen, ""]] : [])].forEach(([bar, number]) => {
      const spot = view.placeOf(bar.source, bar.table, bar.at, bar.lane, bar.depth);
      const begin = bar.start + view.shiftOf(bar.at);
      if (!spot || begin > view.t1 || begin + bar.length < view.t0) return;
      const x = Math.max(view.x(begin), view.left - 4);
      const width = Math.max(Math.min(view.x(begin + bar.length), view.right + 4) - x, 2);
      ctx.strokeStyle = number ? c.accent : c.text;
      ctx.lineWidth = 2;
      ctx.strokeRect(x - 1, spot[0] - 1, width + 1, spot[1] + 2);
      if (!number) return;
      ctx.fillStyle = c.accentFill;
      const y = Math.max(spot[0] - 10, T.AXIS + 1);
      ctx.fillRect(x - 2, y, 14, 12);
      ctx.fillStyle = "#ffffff";
      centre(ctx, `600 10px ${FONT}`);
      ctx.fillText(number, x + 5, y + 6.5);
    });
  };

  /* The line at which all ranks begin, and what; ranks without it are pale. */
  const drawAlignment = (ctx, view, size, alignment, c) => {
    ctx.fillStyle = c.panel;
    ctx.globalAlpha = 0.65;
    for (const at of alignment.missing) {
      const row = view.rowOfRank.get(at);
      if (row) ctx.fillRect(view.left, view.topOf(row), size.width, row.height - 1);
    }
    ctx.globalAlpha = 1;
    const x = view.x(alignment.start);
    if (x < view.left || x > view.right) return;
    ctx.strokeStyle = c.accent;
    ctx.lineWidth = 1.5;
    ctx.setLineDash([6, 3]);
    drawLine(ctx, x, T.AXIS, x, size.height);
    ctx.setLineDash([]);
  };

  /* A range, over the rows of the ranks that are summed. */
  const drawMeasure = (ctx, view, size, range, c) => {
    const [a, b] = range;
    const [x0, x1] = [view.x(Math.min(a, b)), view.x(Math.max(a, b))];
    const chosen = range.ranks && new Set(range.ranks);
    ctx.fillStyle = c.accent;
    ctx.globalAlpha = 0.16;
    if (!chosen) ctx.fillRect(x0, T.AXIS, x1 - x0, size.height);
    for (const row of chosen ? view.rows : []) {
      const isMeant = row.type === "rank" ? chosen.has(row.at) : !row.isOpen && row.ranks.some((at) => chosen.has(at));
      if (isMeant) ctx.fillRect(x0, view.topOf(row), x1 - x0, row.height - 1);
    }
    ctx.globalAlpha = 1;
    ctx.fillRect(x0, T.AXIS, 1, size.height);
    ctx.fillRect(x1, T.AXIS, 1, size.height);
    const text = T.duration(Math.abs(b - a));
    centre(ctx, `600 13px ${FONT}`);
    const width = ctx.measureText(text).width + 14;
    const middle = Math.min(Math.max((x0 + x1) / 2, view.left + width / 2), view.right - width / 2);
    ctx.fillRect(middle - width / 2, T.AXIS + 6, width, 22);
    ctx.fillStyle = "#ffffff";
    ctx.fillText(text, middle, T.AXIS + 17.5);
  };

  /* Memory of each rank as an area, on the scale of the rank that had most. */
  const drawMemory = (ctx, view, part) => {
    const { rank, bytes } = part.sections.memory;
    const { buckets, mostBytes, colours } = view.about;
    const { begin, end } = part.time;
    const each = (end - begin) / buckets;
    const first = Math.max(Math.floor((Math.max(part.clip[0], view.t0) - begin) / each), 0);
    const last = Math.min(Math.ceil((Math.min(part.clip[1], view.t1) - begin) / each), buckets);
    rank.forEach((at, row) => {
      const spot = part.memorySpot(at);
      if (!spot || last <= first) return;
      const bottom = spot[0] + spot[1];
      ctx.fillStyle = colours.memory;
      ctx.globalAlpha = part.isStandIn ? 0.4 : 0.75;
      ctx.beginPath();
      ctx.moveTo(Math.max(view.x(begin + first * each), view.left), bottom);
      for (let bucket = first; bucket < last; bucket += 1) {
        const y = bottom - (bytes[row * buckets + bucket] / mostBytes) * spot[1];
        ctx.lineTo(Math.max(view.x(begin + bucket * each), view.left), y);
        ctx.lineTo(view.x(begin + (bucket + 1) * each), y);
      }
      ctx.lineTo(view.x(begin + last * each), bottom);
      ctx.closePath();
      ctx.fill();
      ctx.globalAlpha = 1;
    });
  };

  const drawGroups = (ctx, view, part) => {
    const { shares, num: numGroups } = part.sections.groups;
    const levels = numGroups > 32 ? 12 : 32;
    if (!part.tile.strips) {
      const canvas = document.createElement("canvas");
      canvas.width = 1024;
      canvas.height = numGroups * levels;
      const pen = canvas.getContext("2d");
      const image = pen.createImageData(1024, canvas.height);
      const pixels = new Uint32Array(image.data.buffer);
      const colours = view.about.opClasses.map((kind) => pack(T.kindColour(view.about, kind, 0)[0]));
      for (let group = 0; group < numGroups; group += 1) {
        for (let bucket = 0; bucket < 1024; bucket += 1) {
          let filled = 0;
          let level = 0;
          for (let kind = 0; kind < CLASSES; kind += 1) {
            filled += shares[(group * 1024 + bucket) * CLASSES + kind];
            const top = Math.round((filled / 255) * levels);
            for (; level < top; level += 1) pixels[((group + 1) * levels - 1 - level) * 1024 + bucket] = colours[kind];
          }
        }
      }
      pen.putImageData(image, 0, 0);
      part.tile.strips = canvas;
    }
    ctx.globalAlpha = view.alignment ? 0.2 : 1; // a sum of ranks that are shifted apart
    drawRows(ctx, view, part, part.tile.strips, levels, Array.from({ length: numGroups }, (_, group) => [part.groupSpot(group), group]));
    ctx.globalAlpha = 1;
  };

  const drawLabels = (ctx, view, size, c, marks) => {
    inRowsOf(ctx, view, size, 0, () => {
      ctx.fillStyle = c.panel;
      ctx.fillRect(0, T.AXIS, view.left - 1, size.height);
      ctx.textBaseline = "middle";
      for (const row of view.rows) if (row.isPinned === view.pinnedPass) drawLabel(ctx, view, row, size, c, marks);
      ctx.fillStyle = c.line;
      ctx.fillRect(view.left - 1, T.AXIS, 1, size.height);
    });
    if (!view.pinHeight) return;
    ctx.fillStyle = c.accent;
    ctx.fillRect(0, T.AXIS + view.pinHeight - 3, size.width, 2);
  };

  const TOGGLE = 15; // px of a rank's switch of its kernels below its name
  const hasToggle = (view, row) => view.haveEvents.has(row.at) && row.sources[0].compute >= 34;
  T.isOnToggle = (view, row, x, y) => {
    const middle = view.topOf(row) + row.sources[0].top + row.sources[0].compute / 2;
    return hasToggle(view, row) && x < view.left - 50 && Math.abs(y - middle - TOGGLE) < 8;
  };

  /* A text, cut where it would be wider than the room. */
  const cut = (ctx, text, room) => {
    let length = text.length;
    while (length > 1 && ctx.measureText(length < text.length ? `${text.slice(0, length)}…` : text).width > room) length -= 1;
    return length < text.length ? `${text.slice(0, length)}…` : text;
  };

  const drawLabel = (ctx, view, row, size, c, marks) => {
    const y = view.topOf(row);
    if (y + row.height < T.AXIS || y > size.height) return;
    ctx.fillStyle = c.line;
    ctx.fillRect(0, Math.round(y + row.height - 1), size.width, 1);
    ctx.textAlign = "left";
    ctx.fillStyle = c.text;
    if (row.type === "group") {
      ctx.font = `600 12px ${FONT}`;
      const middle = y + (row.isOpen ? row.height : Math.min(row.height, 36)) / 2;
      const words = `${row.ranks.length} rank${row.ranks.length > 1 ? "s" : ""}`;
      const room = view.left - 14 - (row.isOpen ? ctx.measureText(words).width + 8 : 0);
      ctx.fillText(cut(ctx, `${row.isOpen ? "▾" : "▸"} ${row.label}`, room), 6, middle - (row.isOpen ? 0 : 7));
      ctx.font = `11px ${FONT}`;
      ctx.fillStyle = c.soft;
      if (row.isOpen) {
        ctx.textAlign = "right";
        ctx.fillText(words, view.left - 8, middle);
      } else ctx.fillText(words, 20, middle + 8);
      return;
    }
    const { rank, stages } = view.about.ranks[row.at];
    const isMarked = marks.rows && marks.rows.has(row.at);
    if (isMarked) {
      ctx.fillStyle = c.accent;
      ctx.fillRect(0, y, 4, row.height - 1);
    }
    const first = row.sources[0];
    const middle = y + first.top + first.compute / 2;
    const fit = Math.min(12, Math.max(first.compute + 2, 7));
    ctx.font = `600 ${fit}px ${FONT}`;
    ctx.fillStyle = c.text;
    const name = `rank ${rank}`;
    const left = row.isPinned ? 22 : 10;
    if (row.isPinned) drawPin(ctx, 12, middle, c);
    ctx.fillText(name, left, middle);
    const taken = left - 10 + ctx.measureText(name).width;
    if (hasToggle(view, row)) {
      ctx.font = `10px ${FONT}`;
      ctx.fillStyle = c.soft;
      ctx.fillText(cut(ctx, `${view.withEvents.has(row.at) ? "▾" : "▸"} kernels, operators`, view.left - 14), 10, middle + TOGGLE);
    }
    ctx.font = `${fit}px ${FONT}`;
    ctx.fillStyle = c.soft;
    const isSaid = view.isGrouped && view.order === "stage" && !row.isPinned; // by the group above
    const late = view.alignment && lateText(view.alignment, row.at);
    const note = late || (stages.length && !isSaid ? stageText(stages) : "");
    const source = row.sources.length > 1 && first.compute >= 8 ? T.sourceName(first.source).toLowerCase() : "";
    const room = view.left - 18 - taken - (source ? ctx.measureText(source).width + 16 : 8);
    if (late) ctx.fillStyle = c.accent;
    if (note && ctx.measureText(note).width <= room) ctx.fillText(note, 10 + taken + 8, middle);
    ctx.fillStyle = c.soft;
    for (const part of row.sources) {
      const at = y + part.top + part.compute / 2;
      if (row.sources.length > 1 && part.compute >= 8) {
        ctx.textAlign = "right";
        ctx.font = `${Math.min(11, part.compute)}px ${FONT}`;
        const indent = part === first ? taken + 16 : 0;
        ctx.fillText(cut(ctx, T.sourceName(part.source).toLowerCase(), view.left - 8 - indent), view.left - 8, at);
      }
      ctx.textAlign = "right";
      ctx.font = `${LANE_FONT}px ${FONT}`;
      for (const [text, column, middle] of laneNames(part)) ctx.fillText(text, view.left - 8 - column * LANE_COLUMN, y + middle);
      ctx.textAlign = "left";
    }
  };

  /* [name, column from the right, middle] of the lanes of a part of a row: each beside its lane, pushed apart where lanes are flat, in
     two columns where one has no room for all, and where two have none those of lanes that are as high as their name. */
  const laneNames = (part) => {
    const lanes = part.lanes.filter((lane) => !lane.isCompute);
    const isFull = (columns) => Math.ceil(lanes.length / columns) * LANE_FONT > part.bottom - lanes[0].top;
    const columns = lanes.length && [1, 2].find((each) => !isFull(each));
    const named = columns ? lanes : lanes.filter((lane) => lane.height >= LANE_FONT);
    const places = named.map((lane, index) => [lane.name, columns ? index % columns : 0, lane.top + lane.height / 2]);
    for (const column of [0, 1]) {
      const own = places.filter((place) => place[1] === column);
      let below = part.bottom + LANE_FONT / 2;
      for (const place of own.reverse()) place[2] = below = Math.min(place[2], below - LANE_FONT);
      let above = (lanes.length ? lanes[0].top : 0) - LANE_FONT / 2;
      for (const place of own.reverse()) place[2] = above = Math.max(place[2], above + LANE_FONT);
    }
    return places;
  };

  /* How much later a rank began with what the ranks are aligned by, than the chosen one. */
  const lateText = ({ shifts, missing }, own) => {
    if (missing.has(own)) return "not aligned";
    const late = -shifts.get(own);
    return late ? `${late < 0 ? "−" : "+"}${T.duration(Math.abs(late))}` : "chosen";
  };

  const drawPin = (ctx, x, y, c) => {
    ctx.fillStyle = c.accent;
    ctx.fillRect(x - 3.5, y - 6, 7, 2);
    ctx.fillRect(x - 2, y - 4, 4, 4);
    ctx.fillRect(x - 3.5, y, 7, 1.5);
    ctx.fillRect(x - 0.5, y + 1.5, 1, 5);
    ctx.fillStyle = c.text;
  };

  const stageText = (stages) => {
    const names = stages.length <= 3 ? stages.join(", ") : `${stages[0]} … ${stages[stages.length - 1]}`;
    return `${stages.length > 1 ? "stages" : "stage"} ${names}`;
  };

  T.sourceName = (source) => (source === "whatif" ? "What-if" : source[0].toUpperCase() + source.slice(1));

  const SIZES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "KB"], [1, "B"]]; // as the tables have them
  T.bytes = (bytes) => {
    const [size, unit] = SIZES.find(([least]) => bytes >= least) || SIZES[4];
    return `${(bytes / size).toLocaleString("en", { maximumFractionDigits: size > 1 ? 2 : 0 })} ${unit}`;
  };

  const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  T.duration = (ns) => {
    const [size, unit] = UNITS.find(([least]) => Math.abs(ns) >= least) || UNITS[3];
    const value = ns / size;
    return `${value.toLocaleString("en", { maximumFractionDigits: unit === "ns" ? 0 : 3, minimumFractionDigits: 0 })} ${unit}`;
  };

  /* A signed time with three digits, as labels in a picture have it. */
  T.deviation = (ns) => {
    const [size, unit] = UNITS.find(([least]) => Math.abs(ns) >= least) || UNITS[3];
    return `${ns < 0 ? "−" : "+"}${(Math.abs(ns) / size).toLocaleString("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 })} ${unit}`;
  };

  const niceStep = (least) => {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
  };

  /* Time from the chosen step's start, and above it which step it is. */
  const drawAxis = (ctx, view, size, c) => {
    ctx.fillStyle = c.panel;
    ctx.fillRect(0, 0, size.width, T.AXIS);
    const tick = Math.max(niceStep(((view.t1 - view.t0) / (view.right - view.left)) * 90), 1);
    const [scale, unit] = UNITS.find(([least]) => tick >= least) || UNITS[3];
    const digits = Math.max(0, Math.ceil(-Math.log10(tick / scale)));
    centre(ctx, `11px ${FONT}`);
    const zero = view.axisZero;
    for (let time = Math.ceil((view.t0 - zero) / tick) * tick; time <= view.t1 - zero; time += tick) {
      const x = view.x(time + zero);
      ctx.fillStyle = c.soft;
      ctx.fillRect(Math.round(x), T.AXIS - 6, 1, 5);
      const text = (Math.abs(time) < tick / 2 ? 0 : time / scale).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
      if (x > view.left + 12 && x < size.width - 20) ctx.fillText(text, x, T.AXIS - 14);
    }
    ctx.textAlign = "right";
    ctx.fillStyle = c.soft;
    ctx.fillText(view.alignment ? `${unit}, ranks aligned` : `${unit} from ${view.about.stepName ? "the start" : `step ${view.step ?? "–"}`}`, view.left - 8, T.AXIS - 14);
    if (view.alignment) drawAlignedName(ctx, view, size, c);
    else drawSteps(ctx, view, size, c);
    ctx.fillStyle = c.line;
    ctx.fillRect(0, T.AXIS - 1, size.width, 1);
  };

  const drawSteps = (ctx, view, size, c) => {
    ctx.textAlign = "center";
    let last = -1e9;
    for (const [step, begin, end] of view.about.steps) {
      const x0 = Math.max(view.x(begin), view.left);
      const x1 = Math.min(view.x(end), size.width);
      if (x1 - x0 < 1) continue;
      ctx.fillStyle = step === view.step ? c.accent : c.soft;
      ctx.fillRect(x0, 18, x1 - x0 - 1, step === view.step ? 2 : 1);
      const text = view.about.stepName || `step ${step}`;
      const middle = (x0 + x1) / 2;
      const width = ctx.measureText(text).width + 14;
      if (x1 - x0 > width && middle - last > width) {
        ctx.fillText(text, middle, 9);
        last = middle;
      }
    }
  };

  /* In place of the steps, which begin elsewhere on each rank: what all ranks begin with at the line. */
  const drawAlignedName = (ctx, view, size, c) => {
    centre(ctx, `600 12px ${FONT}`);
    ctx.fillStyle = c.accent;
    const width = ctx.measureText(view.alignment.name).width / 2;
    const x = Math.min(Math.max(view.x(view.alignment.start), view.left + width + 4), size.width - width - 4);
    ctx.fillText(view.alignment.name, x, 12);
  };

  /* The whole run's shares of each class of ops over all ranks, up to the largest of them all, drawn once for a width. */
  const profile = (view, tile, width, height) => {
    if (tile.profile && tile.profile.width === width) return tile.profile;
    const canvas = document.createElement("canvas");
    Object.assign(canvas, { width, height });
    const ctx = canvas.getContext("2d");
    const { shares, num } = tile.sections.groups;
    const buckets = Math.min(1024, Math.ceil(view.about.span / tile.bucket));
    const fills = view.about.opClasses.map((kind) => T.kindColour(view.about, kind, 0)[0]);
    const sums = new Float64Array(1024 * CLASSES);
    for (let group = 0; group < num; group += 1) for (let at = 0; at < sums.length; at += 1) sums[at] += shares[group * sums.length + at];
    let most = 0; // of many ranks few may ever compute at once
    for (let at = 0; at < sums.length; at += CLASSES) most = Math.max(most, sums.subarray(at, at + CLASSES).reduce((all, one) => all + one));
    for (let x = 0; x < width; x += 1) {
      const bucket = Math.min(Math.floor((x / width) * buckets), buckets - 1);
      let y = height;
      for (let kind = 0; kind < CLASSES; kind += 1) {
        const part = (sums[bucket * CLASSES + kind] / most) * height;
        if (!(part > 0)) continue;
        ctx.fillStyle = fills[kind];
        ctx.fillRect(x, y - part, 1, part);
        y -= part;
      }
    }
    return (tile.profile = canvas);
  };

  T.drawMinimap = (ctx, view, tile, width, height, colours) => {
    ctx.clearRect(0, 0, width, height);
    if (tile && tile.sections) ctx.drawImage(profile(view, tile, width, height), 0, 0);
    const [x0, x1] = [(view.t0 / view.about.span) * width, (view.t1 / view.about.span) * width];
    ctx.fillStyle = colours.panel;
    ctx.globalAlpha = 0.6;
    ctx.fillRect(0, 0, x0, height);
    ctx.fillRect(x1, 0, width - x1, height);
    ctx.globalAlpha = 1;
    ctx.strokeStyle = colours.accent;
    ctx.lineWidth = 2;
    ctx.strokeRect(Math.max(x0, 1), 1, Math.max(Math.min(x1, width - 1) - Math.max(x0, 1), 2), height - 2);
  };

  /* The legend below a picture that is saved: [entry, x, row] of each, in as many rows as the width asks for. */
  const LEGEND_ROW = 20;
  T.legendPlaces = (entries, width) => {
    let [x, row] = [10, 0];
    return entries.map((entry) => {
      const taken = 36 + entry[0].length * 7;
      if (x > 10 && x + taken > width) [x, row] = [10, row + 1];
      x += taken;
      return [entry, x - taken, row];
    });
  };
  T.legendHeight = (places) => (places.length ? places.at(-1)[2] + 1 : 0) * LEGEND_ROW + 8;
  T.drawLegend = (ctx, places, top, width, c) => {
    ctx.fillStyle = c.panel;
    ctx.fillRect(0, top, width, T.legendHeight(places));
    ctx.font = `12px ${FONT}`;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    for (const [[text, colour, state], x, row] of places) {
      const middle = top + (row + 0.5) * LEGEND_ROW + 2;
      ctx.fillStyle = state ? hatch(ctx, state, c.panel) : colour;
      ctx.fillRect(x, middle - 6, 12, 12);
      ctx.fillStyle = c.text;
      ctx.fillText(text, x + 18, middle);
    }
  };

  T.PHASE_COLOURS = PHASES;
  T.WAIT_COLOUR = WAIT;

  /* [colour, state that is hatched] of a state, for the legend. */
  T.stateLook = (state) => {
    const { solid, colour } = STATES[state] || STATES.unexplained;
    return solid ? [solid] : [colour, state];
  };
  T.isUp = (state) => Boolean((STATES[state] || STATES.unexplained).up);
})();
