// What an answer cost, on three meters that are never mixed, beside the large model alone; and how fast it came.

import { h, number, table } from "./dom.js";

const METERS = [
  ["paper", "paper", "parameters per token written, relative to the large model alone", (value) => number(value)],
  ["flops", "FLOPs", "2 × parameters × tokens processed, catch-up and discarded drafts included", (value) => number(value)],
  ["wall_s", "wall clock", "seconds; the large model's is an estimate from its recent step time", seconds],
];

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${number(value * 1000)} ms` : `${number(value)} s`;
}

export function costTable(cost) {
  const rows = METERS.map(([key, name, , write]) => {
    const [spent, alone] = [cost.spent[key], cost.large_only[key]];
    const ratio = alone > 0 ? spent / alone : null;
    return [name, write(spent), write(alone), ratio === null ? "–" : [
      h("meter", { min: 0, max: 2, high: 1, value: Math.min(ratio, 2), "aria-label": `${name}, relative` }),
      ` ${number(ratio)}×`,
    ]];
  });
  return h("div", {}, table("Cost of this answer", ["meter", "this answer", "large alone", "relative"], rows),
    h("details", {}, h("summary", {}, "What the meters count"),
      h("dl", {}, METERS.map(([, name, meaning]) => [h("dt", {}, name), h("dd", {}, meaning)]))));
}

export function timings(usage, ttftMs) {
  const { ttft_s: ttft, wall_s: wall } = usage.turnout;
  const rest = usage.completion_tokens - 1;
  return [
    ["first token", `${seconds(ttft)} (here after ${seconds(ttftMs / 1000)})`],
    ["per token", rest > 0 ? seconds((wall - ttft) / rest) : "–"],
    ["whole answer", seconds(wall)],
    ["tokens", `${usage.completion_tokens} after a prompt of ${usage.prompt_tokens}`
      + `, ${usage.prompt_tokens_details.cached_tokens} of it cached`],
    ["seed", usage.turnout.seed],
    ["large model's share", `${largeShare(usage.turnout.cost)}, ${usage.turnout.switches} switches`],
  ];
}

// Written, as it is paid for; of the answer's tokens only where a switch dropped some.
function largeShare({ large_share: written, large_kept_share: kept = written }) {
  const [all, stayed] = [written, kept].map((share) => `${Math.round(100 * share)}%`);
  return all === stayed ? all : `${all} written, ${stayed} kept`;
}

export function drafting(counts, speculation) {
  if (!speculation.draft_tokens) return null;
  const rows = speculation.acceptance.map((rate, depth) => [
    `place ${depth + 1}`, speculation.drafted_at[depth], speculation.accepted_at[depth] ?? 0,
    [h("meter", { min: 0, max: 1, value: rate, "aria-label": `accepted at place ${depth + 1}` }),
      ` ${Math.round(100 * rate)}%`],
  ]);
  return h("div", {},
    h("p", {}, `${counts.accepted} drafted tokens accepted, ${counts.recovered} recovered, ${counts.bonus} bonus; `
      + `${number(speculation.tokens_per_round)} tokens per round of ${speculation.rounds}.`),
    table("Drafts by their place", ["in the draft", "drafted", "accepted", "share"], rows));
}
