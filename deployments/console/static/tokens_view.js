// An answer token by token: colour and underline say which model wrote it, marks say how it came to be.

import { fill, h, newId, number } from "./dom.js";

export const KINDS = {
  decoded: "decoded: written by the model itself",
  accepted: "accepted: drafted by the small model, kept by the large one",
  recovered: "recovered: the large model's own, where a draft was rejected",
  bonus: "bonus: the large model's own, after a whole draft was kept",
};
const MARKED = ["accepted", "recovered", "bonus"];
const NEAR_END = 40; // px: whoever has scrolled up further is reading, and is left there

// The place of a model in the legend decides its colour and its line; both panes of a comparison share the places.
export class Palette {
  constructor(names = []) { this.names = [...names]; }

  place(name) {
    let place = this.names.indexOf(name);
    if (place < 0) place = this.names.push(name) - 1;
    return place % 4;
  }
}

export class TokensView {
  constructor(palette, label) {
    this.palette = palette;
    this.pending = false;
    this.detailId = newId("detail");
    this.text = h("div", {
      class: "answer", role: "listbox", tabindex: 0, "aria-label": label, "aria-describedby": this.detailId,
      onkeydown: (event) => this.move(event),
      onfocus: () => this.spans.length && this.select(this.current),
      onmouseover: (event) => this.at(event),
      onclick: (event) => this.at(event),
      onscroll: () => this.scrolled(),
    });
    this.detail = h("div", { class: "detail", id: this.detailId });
    this.legend = h("ul", { class: "legend", "aria-label": "Which model wrote what" });
    this.element = h("div", {}, this.legend, this.text, this.detail);
    this.clear();
    this.hint();
  }

  clear() {
    this.tokens = [];
    this.spans = [];
    this.written = new Map();
    this.parts = []; // tokens and their spans that are parts of a character which is not whole yet
    this.kinds = { decoded: 0, accepted: 0, recovered: 0, bonus: 0, rejected: 0 };
    this.current = 0;
    this.marked = -1;
    this.following = true;
    this.top = 0;
    this.hinted = false;
    fill(this.text);
    fill(this.legend);
    this.text.removeAttribute("aria-activedescendant");
    fill(this.detail, h("p", { class: "quiet" }, "Waiting for the first token…"));
  }

  push(tokens) {
    const batch = document.createDocumentFragment();
    for (const token of tokens) {
      this.tokens.push(token);
      this.written.set(token.source, (this.written.get(token.source) ?? 0) + 1);
      this.kinds[token.kind] = (this.kinds[token.kind] ?? 0) + 1;
      this.kinds.rejected += token.rejected.length;
      this.spans.push(this.span(token, this.spans.length));
      this.write(token, this.spans.at(-1));
      batch.append(this.spans.at(-1));
    }
    this.text.append(batch);
    if (!this.hinted) this.hint();
    this.later();
  }

  span(token, place) {
    const span = h("span", {
      class: `token m${this.palette.place(token.source)} k-${token.kind}`, role: "option", "data-place": place,
      id: `${this.detailId}-${place}`, "aria-selected": "false", "aria-label": spoken(token),
    });
    if (token.rejected.length) span.append(h("del", { class: "rejected" }, token.rejected.map(visible).join(" ")));
    if (token.text.includes("\n")) span.append(h("span", { class: "newline" }, "↵"));
    return span;
  }

  // A character that several tokens make stands in the last of them.
  write(token, span) {
    span.append(token.text);
    if (!token.text && token.bytes) {
      this.parts.push({ token, span });
      return;
    }
    for (const part of this.parts) {
      part.span.setAttribute("aria-label", spoken({ ...part.token, text: `part of ${token.text}` }));
    }
    this.parts = [];
  }

  // Nothing more comes.
  end() {
    if (!this.tokens.length) fill(this.detail);
    this.later();
  }

  hint() {
    this.hinted = true;
    fill(this.detail, h("p", { class: "quiet" },
      "Point at a token, or move through them with the arrow keys, to see where it came from."));
  }

  // What needs a look at the whole, at most once a frame.
  later() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.showLegend();
      if (this.following) this.text.scrollTop = this.text.scrollHeight;
    });
  }

  // Text that grows never moves the view up: whoever does so wants to read there, until the end is looked at again.
  scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.text;
    if (scrollTop < this.top) this.following = false;
    if (scrollHeight - scrollTop - clientHeight < NEAR_END) this.following = true;
    this.top = scrollTop;
  }

  showLegend() {
    const entries = [...this.written].sort((a, b) => this.palette.place(a[0]) - this.palette.place(b[0]));
    const models = entries.map(([name, count]) => h("li", {},
      h("span", { class: `token sample m${this.palette.place(name)}` }, name), ` ${count} `,
      h("span", { class: "quiet" }, `(${Math.round((100 * count) / this.tokens.length)}%)`)));
    const kinds = MARKED.filter((kind) => this.kinds[kind]).map((kind) => h("li", {},
      h("span", { class: `token sample k-${kind}` }, kind), ` ${this.kinds[kind]}`));
    const rejected = this.kinds.rejected
      ? h("li", {}, h("del", { class: "rejected" }, "rejected"), ` ${this.kinds.rejected}`) : null;
    fill(this.legend, models, kinds, rejected);
  }

  at(event) {
    const span = event.target.closest?.(".token");
    if (span && this.text.contains(span)) this.select(Number(span.dataset.place));
  }

  move(event) {
    const steps = {
      ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100, Home: -Infinity, End: Infinity,
    };
    if (!(event.key in steps) || !this.spans.length) return;
    event.preventDefault();
    const wanted = this.current + steps[event.key];
    this.select(Math.max(0, Math.min(this.spans.length - 1, wanted)));
    this.spans[this.current].scrollIntoView({ block: "nearest" });
  }

  select(place) {
    this.spans[this.current]?.setAttribute("aria-selected", "false");
    this.current = place;
    const span = this.spans[place];
    span.setAttribute("aria-selected", "true");
    this.text.setAttribute("aria-activedescendant", span.id);
    const token = this.tokens[place];
    const rows = [
      ["token", h("code", {}, JSON.stringify(token.text))],
      token.bytes ? ["bytes", h("code", {}, token.bytes.map((each) => each.toString(16).padStart(2, "0")).join(" "))] : null,
      ["place, id", `${place + 1}, ${token.id}`],
      ["model", token.source],
      ["kind", KINDS[token.kind] ?? token.kind],
      ["entropy", token.entropy_bits === null ? "not read" : `${number(token.entropy_bits)} bits`],
      ["log-probability", token.logprob === null ? "not read" : `${number(token.logprob)} nats (${percent(token.logprob)})`],
      token.top.length ? ["most probable", h("ol", { class: "likely" }, token.top.map((each) =>
        h("li", {}, h("code", {}, JSON.stringify(each.text)), ` ${percent(each.logprob)}`)))] : null,
      token.rejected.length ? ["rejected drafts", token.rejected.map((each) =>
        [h("code", {}, JSON.stringify(each)), " "])] : null,
    ].filter(Boolean);
    fill(this.detail, h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  }

  // Marks where two answers part; -1 takes the mark away.
  mark(place) {
    if (place === this.marked) return;
    this.spans[this.marked]?.classList.remove("parted");
    this.spans[place]?.classList.add("parted");
    this.marked = place;
  }
}

function percent(logprob) {
  return `${number(100 * Math.exp(logprob))}%`;
}

// What colour, line and marks say to those who see them.
function spoken(token) {
  const text = token.text.replaceAll("\n", " new line ");
  const kind = token.kind === "decoded" ? "" : `, ${token.kind}`;
  const rejected = token.rejected.length ? `, instead of ${token.rejected.map((each) => each.trim() || "space").join(" ")}` : "";
  return `${text.trim() || (token.text ? "space" : "nothing")}, ${token.source}${kind}${rejected}`;
}

// A rejected draft that is a space or the end of a line would not be seen.
function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll(" ", "␣");
}
