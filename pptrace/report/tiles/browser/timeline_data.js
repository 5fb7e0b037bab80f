/* What the timeline asks for, the server of the dashboard or the page itself: tiles of bars as arrays, kept as long as they are likely
   to be seen again. */
(() => {
  const T = (window.pptraceTimeline = window.pptraceTimeline || {});
  const BASE = "/timeline-data/";
  const MOST_TILES = 500;
  const MOST_AT_ONCE = 5;
  const TRY_AGAIN_MS = 1500;
  const ARRAYS = { Int8: Int8Array, Uint8: Uint8Array, Int16: Int16Array, Uint16: Uint16Array, Int32: Int32Array, Uint32: Uint32Array, Float64: Float64Array };

  const decode = (buffer) => {
    const length = new DataView(buffer).getUint32(0, true);
    const { sections } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    for (const section of Object.values(sections)) {
      for (const [name, [type, place, count]] of Object.entries(section.arrays)) {
        section[name] = new ARRAYS[type](buffer, 4 + length + place, count);
      }
    }
    return sections;
  };

  T.NO_ANSWER = "no answer: reload the page"; // the server is gone, or the files have changed

  /* The server of the dashboard. It has every tile, and answers questions. */
  T.Server = class {
    hasAnswers = true;

    async json(path) {
      const answer = await fetch(BASE + path);
      if (!answer.ok) throw new Error(`${answer.status}`);
      const value = await answer.json();
      if (path === "about" && value) this.token = value.token;
      return value;
    }

    tile(path) {
      const [kind, ...rest] = path.split("/");
      return fetch(`${BASE}${kind}/${this.token}/${rest.join("/")}`);
    }

    timesOf(_pathAt, shift, index) {
      return [[shift, index]];
    }
  };

  /* Tiles by their path. What is wanted no more before its turn comes is never asked for. */
  T.Tiles = class {
    constructor(source, onArrival, onStale, onAnswer) {
      this.source = source;
      this.onArrival = onArrival;
      this.onStale = onStale;
      this.onAnswer = onAnswer; // whether the server answers, when that changes
      this.isGone = false;
      this.waitsUntil = 0;
      this.kept = new Map();
      this.asked = new Set();
      this.queue = [];
    }

    get(path) {
      const tile = this.kept.get(path);
      if (tile) {
        this.kept.delete(path);
        this.kept.set(path, tile);
      }
      return tile;
    }

    want(paths) {
      this.queue = paths.filter((path) => !this.kept.has(path) && !this.asked.has(path));
      if (performance.now() >= this.waitsUntil) this.next();
    }

    /* A server that is gone may come again, with the same files: what is missing is asked for anew after a while. */
    tell(isGone) {
      if (isGone) {
        this.waitsUntil = performance.now() + TRY_AGAIN_MS;
        clearTimeout(this.trying);
        this.trying = setTimeout(this.onArrival, TRY_AGAIN_MS + 1);
      }
      if (isGone !== this.isGone) this.onAnswer(!isGone);
      this.isGone = isGone;
    }

    get isWaiting() {
      return this.queue.length + this.asked.size > 0;
    }

    next() {
      while (this.queue.length && this.asked.size < MOST_AT_ONCE) this.fetch(this.queue.shift());
    }

    async fetch(path) {
      this.asked.add(path);
      let tile = { missing: true };
      try {
        const answer = await this.source.tile(path);
        if (answer.status === 409) this.onStale();
        if (answer.status >= 500) throw new TypeError("no answer"); // as of a server, or what is before it, that comes again
        if (answer.ok) tile = { sections: decode(await answer.arrayBuffer()) };
        this.tell(false);
      } catch (error) {
        if (!(error instanceof TypeError)) throw error;
        tile = null;
      } finally {
        this.asked.delete(path);
      }
      if (tile === null) return this.tell(true);
      this.kept.set(path, tile);
      while (this.kept.size > MOST_TILES) this.kept.delete(this.kept.keys().next().value);
      this.next();
      this.onArrival();
    }
  };
})();
