// One answer in the making: streams it, shows it, and can stop it.

import { announce, fill, h } from "./dom.js";
import { ApiError, stream } from "./api.js";
import { candidatesView } from "./candidates_view.js";
import { doubtView } from "./doubt_view.js";
import { EntropyChart } from "./entropy_chart.js";
import { costTable, drafting, timings } from "./meters.js";
import { TokensView } from "./tokens_view.js";

const READ_OUT = 400; // characters: longer answers are read by whoever wants to, from the plain text

export class RunPane {
  // `ruleOf` tells what can be drawn of a method and its parameters.
  constructor(palette, label, ruleOf, onchange) {
    this.label = label;
    this.ruleOf = ruleOf;
    this.onchange = onchange;
    this.aborter = null;
    this.said = ""; // what is to be read: tokens joined have stop strings in them
    this.view = new TokensView(palette, `${label}, token by token`);
    this.chart = new EntropyChart(palette);
    this.state = h("p", { class: "state" }, "Nothing asked yet.");
    this.fault = h("p", { class: "alert", role: "alert", hidden: true });
    this.plain = h("div", {});
    this.doubt = h("div", {});
    this.candidates = h("div", {});
    this.result = h("div", { class: "result" });
    this.heading = h("h2", {}, label);
    this.element = h("section", { class: "pane", "aria-label": label },
      this.heading, this.state, this.fault, this.view.element, this.doubt, this.chart.element, this.plain, this.candidates,
      this.result);
  }

  get running() { return this.aborter !== null; }

  stop() { this.aborter?.abort(); }

  close() {
    this.stop();
    this.chart.close();
  }

  // Asks and shows the answer as it comes; `force` is what it runs with, as far as known. Returns the refusal, if any.
  async run(path, body, force) {
    this.stop();
    const aborter = this.aborter = new AbortController();
    const started = performance.now();
    let first = null;
    let usage = null;
    this.begin(this.ruleOf(force));
    try {
      for await (const event of stream(path, body, aborter.signal)) {
        if (event.usage) usage = event.usage;
        for (const choice of event.choices) {
          this.said += choice.text ?? choice.delta?.content ?? "";
          const tokens = choice.turnout?.tokens ?? [];
          if (tokens.length && first === null) first = performance.now() - started;
          this.take(tokens);
        }
      }
      if (usage === null) throw new ApiError(0, "the answer came without its usage", null, null);
      this.finish(usage, first);
      return null;
    } catch (error) {
      return this.failed(error);
    } finally {
      if (this.aborter === aborter) this.aborter = null;
      this.element.setAttribute("aria-busy", "false");
      this.onchange();
    }
  }

  begin(rule) {
    this.said = "";
    this.view.clear();
    this.chart.begin(rule);
    this.fault.hidden = true;
    for (const each of [this.plain, this.doubt, this.candidates, this.result]) fill(each);
    this.element.setAttribute("aria-busy", "true");
    this.state.textContent = "Asked; waiting for the first token.";
    this.onchange();
  }

  take(tokens) {
    if (!tokens.length) return;
    this.view.push(tokens);
    this.chart.push(tokens);
    this.state.textContent = `Writing: ${this.view.tokens.length} tokens so far.`;
    this.onchange();
  }

  finish(usage, first) {
    const details = usage.turnout;
    this.chart.rule(this.ruleOf(details));
    const count = this.view.tokens.length;
    const { candidates = [], doubts = [] } = details;
    const abstained = doubts.some((each) => each.outcome === "abstained") ? " No answer is given: the doubt is too high." : "";
    this.state.textContent = `Done: ${count} tokens by ${details.method}.${abstained}`;
    this.ended(`${count} tokens.${abstained}`);
    const several = new Set([...doubts.map((each) => each.answer), ...candidates.flatMap((each) => each.answers)]).size > 1;
    fill(this.doubt, doubtView(doubts, several));
    fill(this.candidates, candidatesView(candidates, several));
    fill(this.result,
      costTable(details.cost),
      drafting(this.view.kinds, details.speculation),
      h("dl", { class: "facts" }, timings(usage, first ?? 0).map(([name, value]) =>
        [h("dt", {}, name), h("dd", {}, value)])),
      details.route ? h("p", { class: "quiet" }, `Routed: ${details.route.reason}`) : null,
      details.notes.length ? h("ul", { class: "notes" }, details.notes.map((note) => h("li", {}, note))) : null);
  }

  // What there is can be read and copied without its marks; only what is short is read out.
  ended(how) {
    const text = this.said;
    this.view.end();
    announce(`${this.label}: ${how} ${text.length <= READ_OUT ? text : "It is long: open Plain text to read it."}`);
    if (text) {
      fill(this.plain, h("details", {}, h("summary", {}, "Plain text"),
        h("pre", { class: "plain", tabindex: 0, role: "region", "aria-label": `${this.label}, plain text` }, text)));
    }
  }

  failed(error) {
    const count = this.view.tokens.length;
    if (error.name === "AbortError") {
      this.state.textContent = `Stopped after ${count} tokens.`;
      this.ended("stopped.");
      return null;
    }
    if (!(error instanceof ApiError)) console.error(error);
    const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    if (count) {
      this.state.textContent = `Broken off after ${count} tokens.`;
      this.ended("broken off.");
    } else {
      this.state.textContent = error.status >= 400 ? "Refused." : "No answer.";
      this.view.end();
    }
    this.fault.textContent = `${error.message.replace(/\.$/, "")}.${wait}`;
    this.fault.hidden = false;
    return error;
  }
}
