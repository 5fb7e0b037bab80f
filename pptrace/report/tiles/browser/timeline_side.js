/* What stays on the screen of the timeline: the bar that was clicked, bars whose details are kept, rows pinned to the top, the journey
   of a microbatch; and the alignment of all ranks by one bar. A bar is named by its place: source, step, table, rank, lane, start. */
(() => {
  const T = (window.pptraceTimeline = window.pptraceTimeline || {});
  const { make } = T;
  const MOST_KEPT = 12;
  const CAN_ALIGN = ["ops", "comms"];

  Object.assign(T.Timeline.prototype, {
    textOf: ({ source, step, table, rank, lane, start }) => [source, step, table, rank, lane, start].join("."),

    placeOfText(text) {
      const [source, step, table, rank, lane, start] = text.split(".");
      return { source, step: Number(step), table, rank: Number(rank), lane: Number(lane), start: Number(start) };
    },

    placeOfHit(hit) {
      const { part, table, section, bar, at, lane, start, length } = hit;
      const place = { source: part.source, step: this.stepOf(part.source), table, rank: this.about.ranks[at].rank, lane, start };
      return this.store.hasAnswers ? place : { ...place, at, length, depth: section.depth[section.track[bar]], microbatch: -1, lines: this.localLines(hit) };
    },

    /* The bar that a key is about: under the pointer, else clicked, else found. */
    target() {
      if (this.pointed && this.pointed.cell === undefined && !this.tip.hidden) return this.placeOfHit(this.pointed);
      if (this.chosen) return this.chosen;
      const [at, start, , table, lane] = (this.found && this.found.bars[this.found.index]) || [];
      return at === undefined ? null : { source: "measured", step: 0, table, rank: this.about.ranks[at].rank, lane, start };
    },

    pathOfBar({ source, step, table, rank, lane, start }) {
      return `${this.about.token}/${this.nameOf(source)}/${step}/${table}/${rank}/${lane}/${start}`;
    },

    /* What the server knows of a bar; null where there is none in this place. Without a server, its place has what is known. */
    async askOf(place) {
      if (!this.store.hasAnswers) return place;
      if (place.source === "whatif" && !this.change) return null;
      const known = await this.store.json(`at/${this.pathOfBar(place)}`).catch(() => null);
      return known && { ...known, source: place.source, table: place.table, rank: place.rank, ofStep: known.step, step: place.step };
    },

    async restoreBars(asked, isLeft) {
      const bars = (name) => (asked.get(name) || "").split(",").filter(Boolean).slice(0, MOST_KEPT).map((text) => this.askOf(this.placeOfText(text)));
      this.kept = (await Promise.all(bars("kept"))).filter(Boolean);
      const chosen = (await bars("bar")[0]) || null;
      if (isLeft("bar")) this.chosen = chosen;
      if (asked.get("align")) await this.align(this.placeOfText(asked.get("align")));
      this.fillSide();
    },

    async choose(hit) {
      this.takeBack("bar");
      if (!hit || hit.cell !== undefined) return this.journey || this.chosen ? this.escape() : null;
      const chosen = await this.ask("bar", this.askOf(this.placeOfHit(hit)));
      if (chosen === undefined) return null;
      this.chosen = chosen;
      this.journey = null;
      this.changedSide();
      if (!this.chosen || this.chosen.microbatch < 0) return null;
      const step = this.stepAt(hit.start);
      const number = hit.table === "ops" || !step ? this.chosen.ofStep : step[0];
      return this.select(this.chosen.rank, this.chosen.microbatch, number);
    },

    async keep(place) {
      if (!place || this.kept.length >= MOST_KEPT) return;
      if (this.kept.some((bar) => this.textOf(bar) === this.textOf(place))) return this.unkeep(place);
      const bar = await this.askOf(place);
      if (bar && !this.kept.some((other) => this.textOf(other) === this.textOf(bar))) this.kept.push(bar); // while it was asked
      this.changedSide();
    },

    unkeep(place) {
      this.kept = this.kept.filter((bar) => this.textOf(bar) !== this.textOf(place));
      this.changedSide();
    },

    pinRow(at) {
      if (!this.pinned.delete(at)) this.pinned.add(at);
      this.tip.hidden = true;
      this.fillSide();
      this.changed();
    },

    pinTarget() {
      const place = this.target();
      if (place) this.pinRow(this.about.ranks.findIndex(({ rank }) => rank === place.rank));
    },

    /* Alignment: every rank is shifted as a whole, so that its op or collective of this name begins where that of the chosen rank does. */

    toggleAlignment(place) {
      const isSame = this.alignment && (!place || this.textOf(this.alignment) === this.textOf(place));
      return isSame || !place ? this.unalign() : this.align(place);
    },

    async align(place) {
      if (!CAN_ALIGN.includes(place.table) || (place.source === "whatif" && !this.change)) return;
      const answer = await this.ask("align", this.store.json(`align/${this.pathOfBar(place)}`).catch(() => null));
      if (!answer) return;
      this.alignment = { ...place, name: answer.name, shifts: new Map(answer.shifts), missing: new Set(answer.missing) };
      this.tellAlignment();
    },

    unalign() {
      this.takeBack("align");
      this.alignment = null;
      this.tellAlignment();
    },

    tellAlignment() {
      const { alignment } = this;
      this.alignNote.hidden = !alignment;
      if (alignment) {
        const late = [...alignment.shifts].map(([at, shift]) => [-shift, this.about.ranks[at].rank]).sort((a, b) => a[0] - b[0]);
        const [least, most] = [late[0], late[late.length - 1]];
        const spread = late.length > 1 ? ` It began first on rank ${least[1]}, and ${T.duration(most[0] - least[0])} later on rank ${most[1]}.` : "";
        const missing = alignment.missing.size ? ` ${alignment.missing.size} rank${alignment.missing.size > 1 ? "s have" : " has"} none and ${alignment.missing.size > 1 ? "stay" : "stays"}.` : "";
        const words = `Aligned: each rank is shifted so that “${alignment.name}” begins where it does on rank ${alignment.rank}; times of different ranks do not compare.${spread}${missing}`;
        this.alignNote.replaceChildren(words, " ", this.button("Undo", "Each rank at its own times again (X)", () => this.unalign(), { id: "timeline-unalign" }));
      }
      this.changedSide();
    },

    /* The column at the right */

    fillSide() {
      const cards = this.kept.map((bar, index) => this.card(bar, index + 1));
      const chosen = this.chosen && !this.kept.some((bar) => this.textOf(bar) === this.textOf(this.chosen)) ? [this.card(this.chosen, 0)] : [];
      this.side.replaceChildren(...(this.summed ? [this.sumCard()] : []), ...chosen, ...cards, ...(this.journey ? this.journeyList() : []));
      this.side.hidden = !this.side.childElementCount;
    },

    card(bar, number) {
      const at = bar.at;
      const step = this.stepAt(bar.start);
      const [[, title], ...rest] = bar.lines;
      const source = bar.source === "measured" ? [] : [["source", T.sourceName(bar.source)]];
      const from = [step && !this.about.stepName ? `from step ${step[0]}` : "from", T.duration(bar.start - (step ? step[1] : 0))];
      const rows = [...source, ["rank", String(bar.rank)], from, ...rest.filter(([name]) => name !== "rank" && name !== "from")];
      const keep = number
        ? this.button("×", "Let go of these details (K)", () => this.unkeep(bar))
        : this.button("Keep", "Keep these details here (K)", () => this.keep(bar));
      const buttons = [
        this.button("Show", "Go there", () => this.goToBar(bar)),
        ...(CAN_ALIGN.includes(bar.table) && this.store.hasAnswers ? [this.button("Align", "Shift each rank so that this begins at one place on all of them (X)", () => this.toggleAlignment(bar))] : []),
        this.button(this.pinned.has(at) ? "Unpin rank" : "Pin rank", "The rank's row at the top (R)", () => this.pinRow(at)),
        keep,
        ...(number ? [] : [this.button("×", "Close (Esc)", () => this.escape())]),
      ];
      const list = make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]));
      const mark = number ? [make("span", { className: "card-number", text: String(number) })] : [];
      return make("section", { className: "bar-card", "aria-label": title }, make("h2", {}, ...mark, title), list, make("div", { className: "tool-group" }, ...buttons));
    },

    goToBar(bar) {
      const middle = bar.start + bar.length / 2 + this.shiftOf(bar.at);
      const width = Math.max(Math.min(this.t1 - this.t0, bar.length * 40), bar.length * 4);
      this.show(middle - width / 2, middle + width / 2);
      this.reveal(bar.at);
      this.redraw();
    },

    journeyList() {
      const { microbatch, step, hops } = this.journey;
      const items = hops.map((hop) => {
        const isComm = hop.table === "comms";
        const name = isComm ? `${hop.what === "send" ? "send to" : "receive from"} rank ${hop.peer}` : `${this.about.kindNames[hop.what] || hop.what}`;
        const where = `rank ${hop.rank}${hop.stage >= 0 ? ` · stage ${hop.stage}` : ""}`;
        const when = T.duration(hop.start_ns - this.zero);
        const long = isComm ? `${T.duration(hop.transfer_ns)} transfer, ${T.duration(hop.wait_ns)} wait` : T.duration(hop.end_ns - hop.start_ns);
        const late = hop.late_ns === null ? "" : `${hop.late_ns < 0 ? "−" : "+"}${T.duration(Math.abs(hop.late_ns))}`;
        const chip = make("span", { className: "hop-chip" });
        chip.style.background = isComm ? this.about.colours.transfer : T.kindColour(this.about, hop.what, 0)[0];
        const button = make("button", { type: "button", className: "hop" },
          chip, make("span", { className: "hop-name", text: name }), make("span", { className: `hop-late${hop.late_ns > 0 ? " bad" : ""}`, text: late, title: "later than in the plan at mean costs with free messages" }),
          make("span", { className: "hop-where", text: `${where} · at ${when} · ${long}` }));
        button.addEventListener("click", () => this.focusHop(hop));
        return make("li", { "data-what": hop.what, "data-rank": hop.rank }, button);
      });
      return [
        make("div", { className: "side-head" }, make("h2", { text: `Microbatch ${microbatch}, step ${step}` }), this.button("×", "Close (Esc)", () => this.escape())),
        make("p", { className: "note", text: `${hops.length} hops; the signed time is how much later than in the plan` }),
        make("ol", { id: "timeline-journey" }, ...items),
      ];
    },

    focusHop(hop) {
      this.journey.focus = hop;
      const middle = (hop.start_ns + hop.end_ns) / 2 + this.shiftOf(hop.at);
      if (middle < this.t0 || middle > this.t1) this.show(middle - (this.t1 - this.t0) / 2, middle + (this.t1 - this.t0) / 2);
      this.reveal(hop.at);
      this.redraw();
    },
  });
})();
