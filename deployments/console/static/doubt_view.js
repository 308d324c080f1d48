// Doubt next to the answer: what was measured, what it means, and whether the answer was given.

import { h, number } from "./dom.js";

export function doubtView(doubts, several) {
  return doubts.map((doubt) => {
    const of = several ? ` about answer ${doubt.answer + 1}` : "";
    const unit = doubt.unit ? ` ${doubt.unit}` : "";
    const { least, greatest, value } = doubt;
    const bounded = least !== null && greatest !== null;
    return h("section", { class: doubt.outcome === "abstained" ? "doubt high" : "doubt", "aria-label": `Doubt${of}` },
      h("p", {}, h("strong", {}, `Doubt${of}: ${number(value)}${unit}`), " ",
        bounded ? h("meter", { min: least, max: greatest, value, "aria-label": `Doubt, from ${number(least)} to ${number(greatest)}` }) : null,
        bounded ? h("span", { class: "quiet" }, ` from ${number(least)} to ${number(greatest)}`) : null),
      h("p", { class: "help" }, `${doubt.part}: ${doubt.meaning || "the greater, the more doubt"}.`),
      h("p", {}, outcome(doubt)));
  });
}

// What became of the answer.
export function outcome(doubt) {
  const limit = doubt.limit === null ? "" : number(doubt.limit);
  return {
    reported: "No limit is set: the answer is given whatever the doubt.",
    kept: `Not above the limit, ${limit}: the answer is given.`,
    abstained: `Above the limit, ${limit}: no answer is given; what stands in its place was not written by a model.`,
    deferred: `The limit is ${limit}: another model's answer is given in place of the one that was doubted.`,
  }[doubt.outcome] ?? "";
}
