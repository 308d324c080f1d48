// A graph of tokens as a tree that the keyboard walks: runs without a branch are one piece, what is shared stands once.

import { fill, h, newId, number } from "./dom.js";

const MOST_ENDS = 3; // named at one place
const MOST_LEVELS = 40; // of branches within branches: deeper ones are neither read nor drawn well

// Pieces of a graph: {places, text, logprob, children}, or {joins} where a way leads to a piece that stands elsewhere.
export function branches(graph) {
  const after = graph.nodes.map(() => []);
  const before = graph.nodes.map(() => 0);
  for (const edge of graph.edges) {
    after[edge.before].push(edge);
    before[edge.after] += 1;
  }
  for (const edges of after) edges.sort((a, b) => b.logprob - a.logprob);
  const ending = new Set(graph.ends);
  const seen = new Map(); // node -> the piece that begins with it
  const root = { places: [0], text: "", logprob: 0, children: [] };
  const waiting = [root];
  while (waiting.length) {
    const piece = waiting.pop();
    piece.children = after[piece.places.at(-1)].map((edge) => {
      if (seen.has(edge.after)) return { joins: seen.get(edge.after), logprob: edge.logprob, children: [] };
      const made = { places: [edge.after], text: graph.nodes[edge.after].text, logprob: edge.logprob, children: [] };
      seen.set(edge.after, made);
      for (let last = edge.after; ;) {
        const [only, ...others] = after[last];
        if (!only || others.length || ending.has(last) || before[only.after] > 1) break;
        last = only.after;
        made.places.push(last);
        made.text += graph.nodes[last].text;
        made.logprob += only.logprob;
      }
      return made;
    });
    waiting.push(...piece.children.filter((each) => !each.joins).reverse());
  }
  return root;
}

export class TreeView {
  // `ends` has, by node, the candidates that end there.
  constructor(root, ends, label) {
    this.ends = ends;
    this.taken = new Set([...ends.values()].flat().filter((each) => each.answers.length).flatMap((each) => each.path));
    this.items = new Map(); // element -> piece
    this.numbers = new Map(); // piece -> its number, by which ways to it name it
    for (const piece of joined(root)) this.numbers.set(piece, this.numbers.size + 1);
    this.detailId = newId("branch");
    this.tree = h("ul", {
      class: "tree", role: "tree", "aria-label": label, "aria-describedby": this.detailId,
      onkeydown: (event) => this.key(event), onclick: (event) => this.click(event),
    }, root.children.map((child) => this.item(child, "", 1)));
    this.detail = h("div", { class: "branch", id: this.detailId },
      h("p", { class: "quiet" }, "Choose a branch, or walk through them with the arrow keys, to read the text up to it."));
    this.element = h("div", {}, h("div", { class: "scroll treebox" }, this.tree), this.detail);
    this.current = this.tree.firstElementChild;
    this.current?.setAttribute("tabindex", "0");
  }

  item(piece, before, level) {
    const share = `${number(100 * Math.exp(piece.logprob))}%`;
    if (piece.joins) {
      const target = this.numbers.get(piece.joins);
      const element = h("li", { role: "treeitem", tabindex: -1, "aria-selected": "false" },
        h("span", { class: "twig" }, h("span", {}, `→ continues at [${target}] `), h("code", {}, shown(piece.joins.text)),
          h("span", { class: "quiet" }, ` ${share}`)));
      this.items.set(element, { ...piece, text: "", before });
      return element;
    }
    const found = this.ends.get(piece.places.at(-1)) ?? [];
    const taken = piece.places.some((place) => this.taken.has(place));
    const label = this.numbers.has(piece) ? h("span", { class: "quiet" }, `[${this.numbers.get(piece)}] `) : null;
    const deep = level === MOST_LEVELS && piece.children.length > 0;
    const children = deep ? [] : piece.children.map((child) => this.item(child, before + piece.text, level + 1));
    const element = h("li", {
      role: "treeitem", tabindex: -1, "aria-selected": "false", "aria-expanded": children.length ? "true" : undefined,
      class: taken ? "taken" : undefined,
    },
    h("span", { class: "twig" }, h("span", { class: "fold", "aria-hidden": "true" }), label,
      h("code", {}, shown(piece.text)), h("span", { class: "quiet" }, ` ${share} `), found.slice(0, MOST_ENDS).map(ending),
      found.length > MOST_ENDS ? h("span", { class: "quiet" }, `and ${found.length - MOST_ENDS} more`) : null,
      deep ? h("span", { class: "quiet" }, "… branches from here are not drawn") : null),
    children.length ? h("ul", { role: "group" }, children) : null);
    this.items.set(element, { ...piece, before });
    return element;
  }

  visible() {
    return [...this.tree.querySelectorAll("[role=treeitem]")].filter((each) => !each.parentElement.closest("[aria-expanded=false]"));
  }

  click(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    if (event.target.closest(".fold")) this.open(item, item.getAttribute("aria-expanded") === "false");
    this.select(item);
  }

  key(event) {
    const items = this.visible();
    const at = items.indexOf(this.current);
    const folded = this.current.getAttribute("aria-expanded");
    const moves = {
      ArrowDown: () => items[at + 1], ArrowUp: () => items[at - 1], Home: () => items[0], End: () => items.at(-1),
      ArrowRight: () => {
        if (folded !== "false") return folded ? items[at + 1] : null;
        this.open(this.current, true);
        return null;
      },
      ArrowLeft: () => {
        if (folded !== "true") return this.current.parentElement.closest("[role=treeitem]");
        this.open(this.current, false);
        return null;
      },
      Enter: () => this.current, " ": () => this.current,
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const wanted = moves[event.key]();
    if (wanted) this.select(wanted);
  }

  open(item, open) {
    if (item.hasAttribute("aria-expanded")) item.setAttribute("aria-expanded", String(open));
  }

  select(item) {
    this.current.setAttribute("tabindex", "-1");
    this.current.setAttribute("aria-selected", "false");
    this.current = item;
    item.setAttribute("tabindex", "0");
    item.setAttribute("aria-selected", "true");
    item.focus();
    const piece = this.items.get(item);
    const count = piece.joins ? "continues at a piece that stands elsewhere" : `${number(piece.places.length)} token${piece.places.length === 1 ? "" : "s"}`;
    fill(this.detail, h("dl", {},
      h("dt", {}, "text up to here"), h("dd", {}, h("span", { class: "said" }, piece.before, h("strong", {}, piece.text))),
      h("dt", {}, "this branch"), h("dd", {}, `${count}, log-probability ${number(piece.logprob)} nats`)));
  }
}

// Pieces that ways from elsewhere lead to.
function* joined(root) {
  const found = new Set();
  const waiting = [root];
  while (waiting.length) {
    const piece = waiting.pop();
    if (piece.joins && !found.has(piece.joins)) {
      found.add(piece.joins);
      yield piece.joins;
    }
    waiting.push(...piece.children.toReversed());
  }
}

function ending({ rank, score, answers }) {
  const worth = score === null ? "" : `, ${number(score)}`;
  const words = answers.length ? `no. ${rank}${worth}, shown` : `no. ${rank}${worth}`;
  return h("span", { class: answers.length ? "badge good" : "badge" }, words);
}

// Spaces and ends of lines at a branch would not be seen.
function shown(text) {
  return text.replaceAll("\n", "↵").replace(/^ | $/g, "␣") || "(nothing)";
}
