/* A timeline in a page that no server answers: where its tiles come from, and what is known of a bar. */
(() => {
  const T = (window.pptraceTimeline = window.pptraceTimeline || {});

  /* A page that holds its tiles itself: the coarsest of all time, and finer ones where these tell more. It answers no questions. */
  T.Page = class {
    hasAnswers = false;

    constructor(text) {
      Object.assign(this, JSON.parse(text)); // about; tiles: base64 of gzip by path; shift: that of the coarsest; partial: paths of tiles without each bar
      this.partial = new Set(this.partial);
    }

    async json(path) {
      if (path !== "about") throw new Error(path);
      return this.about;
    }

    async tile(path) {
      if (!this.tiles[path]) return new Response(null, { status: 404 });
      const bytes = Uint8Array.from(atob(this.tiles[path]), (letter) => letter.charCodeAt(0));
      return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
    }

    /* The times, as shift and index, of the tiles that show a time: the one asked for, or the two that are one level finer, as only every
       second level is there, or else the finest of those that are coarser. */
    timesOf(pathAt, shift, index) {
      const isThere = (time) => this.tiles[pathAt(...time)];
      if (isThere([shift, index])) return [[shift, index]];
      const width = this.about.buckets * 2 ** (shift - 1);
      const finer = [2 * index, 2 * index + 1].filter((half) => half * width < this.about.span).map((half) => [shift - 1, half]);
      if (finer.every(isThere)) return finer;
      for (let up = 1; shift + up < this.shift; up += 1) {
        const time = [shift + up, Math.floor(index / 2 ** up)];
        if (isThere(time)) return [time];
      }
      return [[this.shift, 0]];
    }

    /* Whether the finest tile of a time, ns, has each bar by itself. */
    hasEachBar(pathAt, time) {
      for (let shift = 0; shift < this.shift; shift += 1) {
        const path = pathAt(shift, Math.floor(time / (this.about.buckets * 2 ** shift)));
        if (this.tiles[path]) return !this.partial.has(path);
      }
      return !this.partial.has(pathAt(this.shift, 0));
    }
  };

  /* Memory of a tile, events in order of time, as buckets of another time: the most in each. */
  T.inBuckets = ({ rank, row, start, held }, { begin, end }, buckets) => {
    const bytes = new Float64Array(rank.length * buckets);
    const each = (end - begin) / buckets;
    for (let index = 0; index < start.length; index += 1) {
      const until = row[index + 1] === row[index] ? start[index + 1] : end;
      if (start[index] >= end || (start[index] < begin && until <= begin)) continue;
      const first = Math.max(Math.floor((start[index] - begin) / each), 0);
      const last = Math.min(Math.max(Math.ceil((until - begin) / each), first + 1), buckets);
      for (let at = row[index] * buckets + first; at < row[index] * buckets + last; at += 1) bytes[at] = Math.max(bytes[at], held[index]);
    }
    return { rank, bytes };
  };

  const MESSAGES = { send: "Send to", recv: "Receive from" };
  const CARRIED = { F: "activations", B: "gradients" };
  const SOURCES = { label: "from its label" };

  /* The title of a bar, as a server answers, but for overlapped pairs: a server's tiles have no text of these. */
  T.titleOf = (view, { part, table, section, bar, lane }) => {
    if (table === "events") return section.names[section.name[bar]];
    const { lanes, texts } = view.about.tables[table];
    if (table === "back") {
      const state = texts[lanes[lane]][section.group[bar]];
      const words = state[0].toUpperCase() + state.slice(1);
      return { phases: state, gaps: `${words}, in an op` }[lanes[lane]] || words;
    }
    if (table === "ops") {
      const [kind, microbatch] = [part.texts.kind[section.kind[bar]], section.microbatch[bar]];
      return `${view.about.kindNames[kind] || kind}${microbatch >= 0 ? ` of microbatch ${microbatch}` : ""}`;
    }
    const [kind, peer] = [texts.kind[section.kind[bar]], section.peer[bar]];
    return kind in MESSAGES ? `${MESSAGES[kind]} rank ${peer >= 0 ? peer : "?"}` : kind;
  };

  /* What a tile of a page knows of a bar. */
  T.ownLines = (view, { table, section, bar, lane }) => {
    const { lanes, texts } = view.about.tables[table];
    const textOf = (column) => texts[column][section[column][bar]];
    const lines = (...pairs) => pairs.filter(([, value]) => value);
    const numbers = (...columns) => columns.filter((column) => section[column][bar] >= 0).map((column) => [column, String(section[column][bar])]);
    if (table === "back") return lines(["why", view.about.states[texts[lanes[lane]][section.group[bar]]]]);
    if (table === "ops") {
      const [source, clock] = [textOf("source"), textOf("clock")];
      const known = `${SOURCES[source] || source}${clock && source !== "simulated" ? `, ${clock} clock` : ""}`;
      const ofPair = [...textOf("pair").matchAll(/(\d+)[A-Z_]+?(\d+)/g)].map(([, stage, number]) => `microbatch ${number} on stage ${stage}`);
      return [...lines(["both", ofPair.join(" and ")]), ...numbers("stage", "chunk", ...(view.about.stepName ? [] : ["step"])), ...lines(["phase", textOf("phase")], ["known", known])];
    }
    const about = [...lines(["axis", textOf("axis") || "unknown"], ["carries", CARRIED[textOf("direction")] || textOf("direction")]), ...numbers("microbatch", "step")];
    if (section.match[bar] < 0) return [...about, ["other side", "not in the trace: waiting and transfer cannot be distinguished"]];
    const waits = section.before[bar] + section.after[bar];
    const bytes = section.bytes[bar];
    return [...about, ["waits", T.duration(waits)], ["transfers", T.duration(section.length[bar] - waits)], ...lines(["bytes", bytes > 0 && T.bytes(bytes)])];
  };
})();
