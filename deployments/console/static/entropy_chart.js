// Entropy by token, under the text it belongs to: bars in the writer's colour, the rolling mean, the switch threshold.

import { h } from "./dom.js";

const HEIGHT = 120;
const LEFT = 34;
const TOP = 10;
const BOTTOM = 16;

export class EntropyChart {
  constructor(palette) {
    this.palette = palette;
    this.pending = false;
    this.canvas = h("canvas", { class: "chart", role: "img", "aria-label": "Entropy by token" });
    this.note = h("figcaption", { class: "quiet" });
    this.element = h("figure", { hidden: true }, this.canvas, this.note);
    this.begin({ threshold: null, window: 1 });
    this.watcher = new ResizeObserver(() => this.later());
    this.watcher.observe(this.element);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.later();
    this.scheme.addEventListener("change", this.redraw);
    document.addEventListener("themechange", this.redraw);
  }

  close() {
    this.watcher.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
    document.removeEventListener("themechange", this.redraw);
  }

  // A new answer; the rule is what is known of it yet.
  begin(rule) {
    this.bits = [];
    this.places = [];
    this.known = { count: 0, sum: 0, most: 0 };
    this.rule(rule);
    this.element.hidden = true;
  }

  rule({ threshold, window }) {
    this.threshold = threshold;
    this.window = window;
    this.later();
  }

  push(tokens) {
    for (const token of tokens) {
      this.bits.push(token.entropy_bits);
      this.places.push(this.palette.place(token.source));
      if (token.entropy_bits === null) continue;
      this.known.count += 1;
      this.known.sum += token.entropy_bits;
      this.known.most = Math.max(this.known.most, token.entropy_bits);
    }
    this.element.hidden = !this.known.count;
    this.later();
  }

  // At most once a frame, however fast tokens come.
  later() {
    if (this.pending || this.element.hidden) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(HEIGHT * scale);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const most = Math.max(0.5, this.threshold ?? 0, this.known.most) * 1.08;
    const step = Math.min(14, (width - LEFT - 4) / Math.max(1, this.bits.length));
    // By square root: thresholds are often a hundredth of the highest entropy, and would lie on the axis.
    const y = (bits) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.sqrt(Math.max(0, bits) / most));
    this.axis(context, width, most, y);
    this.bars(context, step, y);
    if (this.window > 1) this.mean(context, step, y);
    if (this.threshold !== null && this.threshold >= 0) this.line(context, width, y(this.threshold));
    this.tell();
  }

  colour(name) {
    return getComputedStyle(this.element).getPropertyValue(name).trim();
  }

  axis(context, width, most, y) {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = this.colour("--quiet");
    context.strokeStyle = this.colour("--edge");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const bits of [0, most / 4, most / 1.08]) {
      context.fillText(bits >= 10 ? bits.toFixed(0) : bits.toFixed(1), LEFT - 6, y(bits));
      context.beginPath();
      context.moveTo(LEFT, Math.round(y(bits)) + 0.5);
      context.lineTo(width, Math.round(y(bits)) + 0.5);
      context.stroke();
    }
  }

  bars(context, step, y) {
    const colours = [0, 1, 2, 3].map((model) => this.colour(`--m${model}`));
    this.bits.forEach((bits, place) => {
      if (bits === null) return;
      const model = this.places[place];
      const x = LEFT + place * step;
      const top = Math.min(y(bits), y(0) - 1.5);
      context.fillStyle = colours[model];
      context.fillRect(x, top, Math.max(1, step - 1), y(0) - top);
      // Not by colour alone: the first model's bars are plain, each other's carry its number of dots below.
      for (let dot = 0; dot < model; dot += 1) {
        context.fillRect(x + Math.max(0, step - 4) / 2, y(0) + 4 + 4 * dot, Math.min(3, step), 2.5);
      }
    });
  }

  mean(context, step, y) {
    context.strokeStyle = this.colour("--text");
    context.lineWidth = 1.5;
    context.beginPath();
    const recent = [];
    let sum = 0;
    this.bits.forEach((bits, place) => {
      if (bits === null) return;
      recent.push(bits);
      sum += bits;
      if (recent.length > this.window) sum -= recent[recent.length - 1 - this.window];
      const x = LEFT + place * step + step / 2;
      context.lineTo(x, y(sum / Math.min(recent.length, this.window)));
    });
    context.stroke();
  }

  line(context, width, at) {
    context.strokeStyle = this.colour("--warn");
    context.lineWidth = 1.5;
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(LEFT, at);
    context.lineTo(width, at);
    context.stroke();
    context.setLineDash([]);
    context.lineWidth = 1;
  }

  tell() {
    const { count, sum, most } = this.known;
    const mean = (sum / Math.max(1, count)).toFixed(2);
    const threshold = this.threshold === null ? "" : ` Dashed: the switch threshold, ${this.threshold} bits.`;
    const line = this.window > 1 ? ` Line: mean of the last ${this.window}.` : "";
    this.note.textContent = `Entropy of each token's distribution, bits, by square root (mean ${mean}).${threshold}${line}`;
    this.canvas.setAttribute("aria-label",
      `Entropy by token: ${count} tokens, mean ${mean} bits, highest ${most.toFixed(2)} bits.${threshold}`);
  }
}
