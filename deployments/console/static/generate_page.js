// The first page: ask, watch, compare.

import { announce, fill, h, newId, rest } from "./dom.js";
import { apiKey, get } from "./api.js";
import { inForce, switchRule } from "./in_force.js";
import { MethodPicker } from "./method_picker.js";
import { RequestParts } from "./request_parts.js";
import { RunPane } from "./run_pane.js";
import { Field } from "./schema_form.js";
import { encode } from "./share.js";
import { Palette } from "./tokens_view.js";

const SAMPLING = {
  temperature: { type: "number", minimum: 0, maximum: 2, default: 1, description: "0 is greedy" },
  max_tokens: { type: "integer", minimum: 1, default: 256, description: "most tokens written" },
  seed: { type: "integer", minimum: 0, default: "a new one each time", description: "same seed, same tokens" },
  top_p: { type: "number", maximum: 1, default: 1, description: "nucleus mass; 1 is off" },
  top_k: { type: "integer", minimum: -1, default: 0, description: "candidates kept; 0 and -1 are off" },
  min_p: { type: "number", minimum: 0, maximum: 1, default: 0, description: "share of the top probability; 0 is off" },
  logprobs: { type: "integer", minimum: 0, maximum: 20, default: 0, description: "alternatives shown per token" },
};
const FIRST = { mode: "chat", prompt: "What is 69*9-32*6+44?", sampling: { temperature: 0, logprobs: 3 } };
const SIDES = ["A", "B"];
let kept = null;

// Whoever looks at another page and comes back finds what was typed and answered, and what is still being written.
export async function generatePage(root, state) {
  const known = kept && kept.key === apiKey() && (state === null || encode(state) === encode(kept.page.state));
  if (!known) {
    const [models, methods] = await Promise.all([get("v1/models"), get("v1/methods")]);
    const page = new GeneratePage(models.data, methods.data, methods.request);
    page.restore(state ?? kept?.page.state ?? FIRST);
    kept?.page.close();
    kept = { page, key: apiKey() };
  }
  const { page } = kept;
  fill(root, page.element);
  document.addEventListener("keydown", page.onescape);
  return () => document.removeEventListener("keydown", page.onescape);
}

class GeneratePage {
  constructor(models, methods, request) {
    // Members in the order of their pools, so that small and large have the same colours in every answer.
    this.palette = new Palette(models.flatMap((model) => Object.values(model.turnout.roles)));
    this.models = models;
    this.methods = methods;
    const changed = () => this.refresh();
    this.pickers = SIDES.map((side) => new MethodPicker(methods, `Method ${side}`, changed));
    this.parts = SIDES.map((side) => new RequestParts(request, `Parts ${side}`, changed));
    this.panes = SIDES.map((side) => new RunPane(this.palette, `Answer ${side}`, (force) => switchRule(methods, force), changed));
    this.sampling = Object.entries(SAMPLING).map(([name, schema]) => [name, new Field(name, name, schema, changed)]);
    this.mode = h("select", { id: newId("mode"), onchange: changed },
      h("option", { value: "chat" }, "chat"), h("option", { value: "completion" }, "completion"));
    this.model = h("select", { id: newId("model"), onchange: changed }, models.map((model) => {
      const roles = Object.keys(model.turnout.roles).join(" and ");
      return h("option", { value: model.id }, roles ? `${model.id}: ${roles}` : `${model.id} alone`);
    }));
    this.prompt = h("textarea", { id: newId("prompt"), rows: 4, oninput: changed });
    this.compare = h("input", { type: "checkbox", id: newId("compare"), onchange: changed });
    // From wherever the keyboard is, but out of a dialog, which it closes.
    this.onescape = (event) => { if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop(); };
    this.build();
    this.lastSeed = null;
    this.same = 0;
    this.told = "";
    this.refresh();
  }

  build() {
    this.go = h("button", { type: "submit", class: "main" }, "Run");
    this.halt = h("button", { type: "button", onclick: () => this.stop() }, "Stop");
    this.again = h("button", { type: "button", onclick: () => this.replay() }, "Same seed again");
    this.link = h("button", { type: "button", onclick: () => this.share() }, "Copy link");
    this.faults = {};
    this.parting = h("p", { class: "parting", hidden: true });
    const labelled = (label, control) => {
      const fault = this.faults[control.id] = h("p", { class: "fault", id: `${control.id}-fault`, hidden: true });
      control.setAttribute("aria-describedby", fault.id);
      return h("div", { class: "field" }, h("label", { for: control.id }, label), control, fault);
    };
    const form = h("form", {
      class: "ask", "aria-label": "Request",
      onsubmit: (event) => { event.preventDefault(); this.run(); },
      onkeydown: (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.run(); }
      },
    },
    labelled("Prompt", this.prompt),
    h("div", { class: "row" }, labelled("Kind", this.mode), labelled("Model", this.model)),
    h("div", { class: "check" }, this.compare, h("label", { for: this.compare.id }, "Compare two methods side by side")),
    SIDES.map((_, side) => [this.pickers[side].element, this.parts[side].element]),
    h("details", { open: innerWidth > 900 }, h("summary", {}, "Sampling"),
      h("div", { class: "fields" }, this.sampling.map(([, field]) => field.element))),
    h("div", { class: "buttons" }, this.go, this.halt, this.again, this.link));
    this.answers = h("div", { class: "answers" }, this.panes.map((pane) => pane.element));
    this.element = h("div", { class: "generate" }, h("h1", { class: "unseen" }, "Generate"), form, h("div", {}, this.parting, this.answers));
  }

  get sides() { return this.compare.checked ? [0, 1] : [0]; }

  get state() {
    const sampling = this.sampling.map(([name, field]) => [name, field.value]).filter(([, value]) => value !== undefined);
    return {
      mode: this.mode.value, model: this.model.value, prompt: this.prompt.value, compare: this.compare.checked,
      sampling: Object.fromEntries(sampling), sides: this.pickers.map((picker, side) => ({ ...picker.value, parts: this.parts[side].value })),
    };
  }

  restore(state) {
    this.mode.value = state.mode === "completion" ? "completion" : "chat";
    this.prompt.value = typeof state.prompt === "string" ? state.prompt : "";
    this.compare.checked = state.compare === true;
    if ([...this.model.options].some((option) => option.value === state.model)) this.model.value = state.model;
    for (const [name, field] of this.sampling) field.value = state.sampling?.[name];
    this.pickers.forEach((picker, side) => { picker.value = state.sides?.[side] ?? { method: "", params: {} }; });
    this.parts.forEach((parts, side) => { parts.value = state.sides?.[side]?.parts; });
    this.refresh();
  }

  refresh() {
    const both = this.compare.checked;
    for (const each of [this.pickers[1], this.parts[1]]) each.element.hidden = !both || each.empty === true;
    this.panes[1].element.hidden = !both;
    this.panes[0].heading.hidden = !both;
    this.answers.classList.toggle("two", both);
    const running = this.panes.some((pane) => pane.running);
    rest(this.halt, !running);
    rest(this.go, running);
    rest(this.again, running || this.lastSeed === null);
    if (both) this.showParting();
    else this.parting.hidden = true;
  }

  body(side, seed) {
    const state = this.state;
    const { logprobs = 0, seed: _, ...sampling } = state.sampling;
    const { method, params, parts } = state.sides[side];
    const decoding = { tokens: true, candidates: true, ...(method ? { method, params } : {}), ...parts };
    const common = { model: state.model, ...sampling, seed, stream: true, stream_options: { include_usage: true }, decoding };
    if (state.mode === "completion") return ["v1/completions", { ...common, prompt: state.prompt, logprobs }];
    const messages = [{ role: "user", content: state.prompt }];
    return ["v1/chat/completions", { ...common, messages, logprobs: true, top_logprobs: logprobs }];
  }

  async run(again = null) {
    if (this.panes.some((pane) => pane.running)) return;
    this.clear();
    // Chosen here, so that both sides have the same one and the answer can be made again; small enough for a JSON number.
    const given = this.sampling.find(([name]) => name === "seed")[1].value;
    const seed = given ?? again ?? crypto.getRandomValues(new Uint32Array(1))[0];
    this.lastSeed = seed;
    announce("Asked.");
    const model = this.models.find((each) => each.id === this.model.value).turnout;
    const runs = this.sides.map(async (side) => {
      const [path, body] = this.body(side, seed);
      const { method, params } = this.pickers[side].value;
      return [side, await this.panes[side].run(path, body, inForce(this.methods, model, method, params))];
    });
    // On a phone the answer is below what was asked.
    if (this.answers.getBoundingClientRect().top > innerHeight / 2) this.answers.scrollIntoView();
    for (const [side, error] of await Promise.all(runs)) if (error) this.refuse(side, error);
    this.refresh();
  }

  replay() { if (this.lastSeed !== null) this.run(this.lastSeed); }

  stop() { this.panes.forEach((pane) => pane.stop()); }

  close() { this.panes.forEach((pane) => pane.close()); }

  clear() {
    this.same = 0;
    this.told = "";
    for (const control of [this.model, this.mode, this.prompt]) this.blame(control, "");
    [...this.pickers, ...this.parts].forEach((each) => each.clear());
    this.sampling.forEach(([, field]) => field.error(""));
  }

  blame(control, text) {
    const fault = this.faults[control.id];
    fault.textContent = text;
    fault.hidden = !text;
    if (text) control.setAttribute("aria-invalid", "true");
    else control.removeAttribute("aria-invalid");
  }

  refuse(side, error) {
    if (this.pickers[side].refuse(error) || this.parts[side].refuse(error)) return;
    const spelled = { top_logprobs: "logprobs" }[error.field] ?? error.field;
    const found = this.sampling.find(([name]) => name === spelled)?.[1];
    const control = { model: this.model, prompt: this.prompt, messages: this.prompt }[spelled?.split(/[.[]/)[0]];
    if (found) {
      found.element.closest("details").open = true;
      found.error(error.message);
      found.focus();
    } else if (control) {
      this.blame(control, error.message);
      control.focus();
    } else if (error.status === 401) {
      document.dispatchEvent(new CustomEvent("keyneeded"));
    }
  }

  // Both sides only grow while they are compared, so what was the same stays so.
  showParting() {
    const [a, b] = this.panes.map((pane) => pane.view);
    const shared = Math.min(a.tokens.length, b.tokens.length);
    let place = Math.min(this.same, shared);
    while (place < shared && a.tokens[place].id === b.tokens[place].id) place += 1;
    this.same = place;
    const done = !this.panes.some((pane) => pane.running);
    const parted = place < shared || (done && a.tokens.length !== b.tokens.length && shared > 0);
    for (const view of [a, b]) view.mark(parted && place < view.tokens.length ? place : -1);
    this.parting.hidden = !shared;
    if (!shared) return;
    if (parted) this.tell(`The answers part at token ${place + 1}; the tokens before it are the same.`);
    else if (done) this.tell(`Both answers are the same: ${shared} tokens.`);
    else this.parting.textContent = `The same so far: ${shared} tokens.`;
  }

  tell(text) {
    this.parting.textContent = text;
    if (text !== this.told) announce(text);
    this.told = text;
  }

  async share() {
    const address = `#/generate?state=${encode(this.state)}`;
    history.replaceState(null, "", address);
    try {
      await navigator.clipboard.writeText(location.href);
      announce("The link is copied.");
      this.link.textContent = "Copied";
    } catch {
      this.link.textContent = "Link is in the address bar";
    }
    setTimeout(() => { this.link.textContent = "Copy link"; }, 2000);
  }
}
