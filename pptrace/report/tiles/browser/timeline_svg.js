/* The part of a canvas' context that the timeline draws with, as SVG: the same code makes the picture on the screen and in a paper. */
(() => {
  const T = (window.pptraceTimeline = window.pptraceTimeline || {});
  const XML = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  const escape = (text) => String(text).replace(/[&<>"]/g, (letter) => XML[letter]).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g, "");
  const short = (value) => Number(value.toFixed(2));

  T.SvgContext = class {
    constructor(width, height, font) {
      Object.assign(this, { width, height, font, parts: [], path: "", fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, globalAlpha: 1 });
      Object.assign(this, { textAlign: "left", textBaseline: "alphabetic", dash: "", saved: [], groups: 0, clips: 0, patterns: new Map() });
    }
    save() {
      const { fillStyle, strokeStyle, lineWidth, globalAlpha, textAlign, textBaseline, font, dash, groups } = this;
      this.saved.push({ fillStyle, strokeStyle, lineWidth, globalAlpha, textAlign, textBaseline, font, dash, groups });
    }
    restore() {
      const state = this.saved.pop();
      while (this.groups > state.groups) {
        this.parts.push("</g>");
        this.groups -= 1;
      }
      Object.assign(this, state);
    }
    setLineDash(parts) { this.dash = parts.join(" "); }
    paint() {
      if (typeof this.fillStyle === "string") return escape(this.fillStyle);
      const { id, colour, ground, up } = this.fillStyle.hatch;
      if (!this.patterns.has(id)) {
        const line = up ? "M-1 7L7 -1M-1 1L1 -1M5 7L7 5" : "M-1 -1L7 7M-1 5L1 7M5 -1L7 1";
        this.patterns.set(id, `<pattern id="hatch-${id}" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="${ground}"/><path d="${line}" stroke="${colour}" stroke-width="1.2"/></pattern>`);
      }
      return `url(#hatch-${id})`;
    }
    fillRect(x, y, w, h) {
      if (w <= 0 || h <= 0) return;
      this.parts.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(w)}" height="${short(h)}" fill="${this.paint()}"${this.alpha()}/>`);
    }
    strokeRect(x, y, w, h) {
      this.parts.push(`<rect x="${short(x)}" y="${short(y)}" width="${short(Math.max(w, 0))}" height="${short(h)}" fill="none"${this.line()}/>`);
    }
    fillText(text, x, y) {
      const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
      const base = this.textBaseline === "middle" ? ' dominant-baseline="central"' : "";
      const [, weight, size] = /(?:(\d+) )?([\d.]+)px/.exec(this.font);
      this.parts.push(`<text x="${short(x)}" y="${short(y)}" text-anchor="${anchor}"${base} font-size="${size}"${weight ? ` font-weight="${weight}"` : ""} fill="${this.paint()}"${this.alpha()}>${escape(text)}</text>`);
    }
    measureText(text) {
      const size = parseFloat(/([\d.]+)px/.exec(this.font)[1]);
      return { width: text.length * size * 0.55 };
    }
    beginPath() { this.path = ""; }
    moveTo(x, y) { this.path += `M${short(x)} ${short(y)}`; }
    lineTo(x, y) { this.path += `L${short(x)} ${short(y)}`; }
    bezierCurveTo(...points) { this.path += `C${points.map(short).join(" ")}`; }
    closePath() { this.path += "Z"; }
    rect(x, y, w, h) { this.path += `M${short(x)} ${short(y)}h${short(w)}v${short(h)}h${short(-w)}Z`; }
    stroke() { this.parts.push(`<path d="${this.path}" fill="none"${this.line()}/>`); }
    fill() { this.parts.push(`<path d="${this.path}" fill="${this.paint()}"${this.alpha()}/>`); }
    clip() {
      this.clips += 1;
      this.parts.push(`<clipPath id="clip-${this.clips}"><path d="${this.path}"/></clipPath><g clip-path="url(#clip-${this.clips})">`);
      this.groups += 1;
    }
    drawImage(image, sx, sy, sw, sh, x, y, w, h) {
      const part = document.createElement("canvas");
      part.width = sw;
      part.height = sh;
      part.getContext("2d").drawImage(image, sx, sy, sw, sh, 0, 0, sw, sh);
      this.parts.push(`<image x="${short(x)}" y="${short(y)}" width="${short(w)}" height="${short(h)}" preserveAspectRatio="none" image-rendering="pixelated" href="${part.toDataURL()}"/>`);
    }
    alpha() { return this.globalAlpha < 1 ? ` opacity="${short(this.globalAlpha)}"` : ""; }
    line() {
      return ` stroke="${escape(this.strokeStyle)}" stroke-width="${this.lineWidth}"${this.dash ? ` stroke-dasharray="${this.dash}"` : ""}${this.alpha()}`;
    }
    toString() {
      const family = "Segoe UI, Roboto, Helvetica Neue, Arial, Liberation Sans, sans-serif";
      return `<svg xmlns="http://www.w3.org/2000/svg" width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}" font-family="${family}"><defs>${[...this.patterns.values()].join("")}</defs>${this.parts.join("")}</svg>`;
    }
  };
})();
