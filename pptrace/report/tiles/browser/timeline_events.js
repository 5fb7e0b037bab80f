/* Lanes of kernels, operators and calls below a rank, a lane for each stream and thread: read and drawn for the ranks that are open. */
(() => {
  const T = (window.pptraceTimeline = window.pptraceTimeline || {});
  const ROW = 13; // px of an event
  const MOST_RANKS = 8; // that are opened at once
  const MOST_AT_START = 4; // of a run without a pipeline
  const LEAST_NAMED = 26; // px of an event with its name
  const LETTER = 5.4;

  /* A kernel's name without its return type, arguments, parameters of templates and namespaces. */
  T.shortName = (name) => {
    const plain = name.replace(/^void /, "").replace(/\(anonymous namespace\)::/g, "");
    const head = /^[\w:.~$ -]+(?=[<(])/.exec(plain);
    if (!head || plain.startsWith("Mem")) return plain;
    const [own] = head[0].split("::").slice(-1);
    const what = own.includes("elementwise") && /\b(\w*Functor\w*|\w+_kernel_cuda|\w+_kernel_impl)\b/.exec(plain.slice(head[0].length));
    return what ? `${own}<${what[1]}>` : own || plain; // torch's elementwise kernels differ in what they apply
  };

  const hash = (text) => {
    let sum = 0;
    for (let at = 0; at < text.length; at += 1) sum = (sum * 31 + text.charCodeAt(at)) | 0;
    return Math.abs(sum) % 3;
  };

  Object.assign(T.Timeline.prototype, {
    /* The ranks whose events are open, as the address says, or at first. */
    readEvents(asked) {
      this.haveEvents = new Set(this.about.haveEvents);
      this.lanesOfEvents = new Map(); // of each rank that was read
      this.numReading = 0;
      this.firstOpen = this.about.hasPipeline ? [] : this.about.orders[this.order].flatMap(([, ranks]) => ranks).filter((at) => this.haveEvents.has(at)).slice(0, MOST_AT_START);
      const wanted = asked.has("events") ? asked.get("events").split(".").filter(Boolean).map(Number) : this.firstOpen;
      this.withEvents = new Set(wanted.filter((at) => this.haveEvents.has(at)));
    },

    writeEvents(query) {
      const open = [...this.withEvents].join(".");
      if (open !== this.firstOpen.join(".")) query.set("events", open);
    },

    async openEvents(ranks) {
      const isFirst = (at) => this.haveEvents.has(at) && !this.lanesOfEvents.has(at);
      await Promise.all(ranks.map(async (at) => {
        if (this.haveEvents.has(at)) this.withEvents.add(at);
        if (!isFirst(at)) return;
        this.lanesOfEvents.set(at, { lanes: [], classes: [] });
        this.numReading += 1;
        const answer = await this.store.json(`lanes/${this.about.token}/${at}`).catch(() => null);
        this.numReading -= 1;
        if (answer) return this.lanesOfEvents.set(at, answer);
        this.lanesOfEvents.delete(at);
        this.withEvents.delete(at);
        return this.say(`The events of rank ${this.about.ranks[at].rank} cannot be read.`);
      }));
      this.changed();
    },

    ranksShown() {
      return this.rows.filter((row) => row.type === "rank").map((row) => row.at);
    },

    /* Of one rank, or of all that are shown. */
    toggleEvents(at) {
      const shown = at === undefined ? this.ranksShown() : [at];
      const ranks = shown.filter((each) => this.haveEvents.has(each)).slice(0, MOST_RANKS);
      if (!ranks.length) return this.say("The files of these ranks list no kernels or operators.");
      if (!ranks.some((each) => this.withEvents.has(each))) return this.openEvents(ranks);
      for (const each of at === undefined ? [...this.withEvents] : ranks) this.withEvents.delete(each);
      return this.changed();
    },

    eventLanesOf(at) {
      const known = this.withEvents.has(at) && this.lanesOfEvents.get(at);
      if (!known) return [];
      const each = ROW * Math.min(this.rowScale, 2);
      return known.lanes.map(({ name, depths }, lane) => ({ name, table: "events", lane, depths, height: depths * each }));
    },

    eventEntries() {
      const seen = new Set([...this.withEvents].flatMap((at) => (this.lanesOfEvents.get(at) || { classes: [] }).classes));
      return this.about.eventClasses.flatMap(([name, shades], code) => (seen.has(code) ? [[name, shades[0][0]]] : []));
    },
  });

  T.drawEvents = (ctx, view, part, spots, shown, { blit, eachBar, pack }) => {
    const section = part.sections.events;
    const looks = view.about.eventClasses.map(([, shades]) => shades);
    blit(ctx, view, section, part, spots, looks.map((shades) => pack(shades[0][0])), 6);
    section.shade ||= section.names.map(hash);
    section.short ||= section.names.map(T.shortName);
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.font = `10px ${T.FONT}`;
    eachBar(view, part, "events", spots, shown, (bar, x, width, spot) => {
      const [fill, ink] = looks[section.group[bar]][section.shade[section.name[bar]]];
      ctx.fillStyle = fill;
      ctx.fillRect(x, spot[0], width > 3 ? width - 0.7 : Math.max(width, 0.7), spot[1]);
      if (width < LEAST_NAMED || spot[1] < 9) return;
      ctx.fillStyle = ink;
      const from = Math.max(x, view.left);
      ctx.fillText(section.short[section.name[bar]].slice(0, Math.max(Math.floor((x + width - from - 6) / LETTER), 0)), from + 3, spot[0] + spot[1] / 2 + 0.5);
    });
  };
})();
