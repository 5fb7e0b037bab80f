/* A range that is measured has its sums by name at the right: ops, time without compute in one, communication, kernels, operators. */
(() => {
  const T = (window.pptraceTimeline = window.pptraceTimeline || {});
  const { make } = T;
  const MOST_ROWS = 15; // of a section, until more are asked for

  Object.assign(T.Timeline.prototype, {
    /* The ranks of the rows from one height to another; null, for all, from the axis on. */
    ranksBetween(y0, y1) {
      const [top, bottom] = [Math.min(y0, y1), Math.max(y0, y1)];
      if (top < T.AXIS) return null;
      const isMeant = (row) => this.topOf(row) < bottom + 1 && this.topOf(row) + row.height > top && this.isSeen(row, Math.max(this.topOf(row), top));
      const ranks = this.rows.filter(isMeant).flatMap((row) => (row.type === "rank" ? [row.at] : row.isOpen ? [] : row.ranks));
      return ranks.length ? ranks : null;
    },

    async sum(range, ranks) {
      const [begin, end] = [Math.min(...range), Math.max(...range)];
      if (this.alignment) return this.say("Sums are of one range of time: undo the alignment first.");
      const measured = [Math.round(begin), Math.round(end)];
      this.measured = Object.assign(measured, { ranks });
      if (!this.store.hasAnswers) return this.redraw();
      const source = this.mainSource;
      const query = new URLSearchParams({ events: [...this.withEvents].join("."), ...(ranks && { ranks: ranks.join(".") }) });
      const path = `${this.about.token}/${this.nameOf(source)}/${this.stepOf(source)}`;
      const sections = await this.ask("sum", this.store.json(`sums/${path}/${measured.join("/")}?${query}`).catch(() => null));
      if (sections === undefined) return null;
      if (!sections) return this.say("The sums of this range cannot be had.");
      this.summed = { source, sections, range: measured, ranks };
      return this.changedSide();
    },

    /* Of what is shown: for keys alone. */
    sumAll() {
      return this.sum([Math.max(this.t0, 0), Math.min(this.t1, this.about.span)], null);
    },

    restoreSum([begin, end, ...ranks]) {
      return this.sum([begin, end], ranks.length ? ranks.filter((at) => this.about.ranks[at]) : null);
    },

    unsum() {
      this.takeBack("sum");
      this.measured = null;
      this.summed = null;
      this.fillSide();
      this.write();
    },

    sumCard() {
      const { range: [begin, end], ranks } = this.summed;
      const number = ranks ? ranks.length : this.about.ranks.length;
      const whole = (end - begin) * number;
      const where = number === 1 ? `rank ${this.about.ranks[ranks ? ranks[0] : 0].rank}` : `${ranks ? "" : "all "}${number} ranks`;
      const hasEvents = this.summed.sections.some(({ title }) => title.startsWith("Operators"));
      const more = this.haveEvents.size && !hasEvents && this.summed.source === "measured" ? [make("p", { className: "note", text: "Of ranks whose kernels are open (E), kernels and operators are summed too." })] : [];
      return make("section", { className: "bar-card", id: "timeline-sums", "aria-label": "Sums of the range" },
        make("div", { className: "side-head" }, make("h2", { text: `${T.duration(end - begin)} on ${where}` }), this.button("×", "Close (Esc)", () => {
          this.unsum();
          this.redraw();
        })),
        ...this.summed.sections.map((section) => this.sumTable(section, whole)), ...more);
    },

    sumTable({ title, rows, more }, whole) {
      const isEvents = /^(Kernels|Operators)/.test(title);
      const hasWaits = rows.some((row) => row.waits_ns);
      const head = ["", "n", "time", ...(hasWaits ? ["waits"] : []), "share"];
      const line = (row) => make("tr", {}, make("th", { scope: "row", text: isEvents ? T.shortName(row.name) : row.name, title: row.name }),
        ...[row.count.toLocaleString("en"), T.duration(row.ns), ...(hasWaits ? [T.duration(row.waits_ns)] : []), `${((100 * row.ns) / whole).toFixed(1)} %`].map((text) => make("td", { text })));
      const body = make("tbody", {}, ...rows.slice(0, MOST_ROWS).map(line));
      const left = rows.slice(MOST_ROWS);
      const table = make("table", { className: "sums" }, make("caption", { text: title }), make("thead", {}, make("tr", {}, ...head.map((text) => make(text ? "th" : "td", text ? { text, scope: "col" } : {})))), body);
      if (!left.length) return table;
      const button = this.button(`${left.length + more} more`, "Show more names", () => {
        body.append(...left.map(line));
        button.remove();
      });
      return make("div", {}, table, button);
    },
  });
})();
