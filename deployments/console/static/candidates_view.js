// What an answer was chosen from: candidates side by side, with scores and votes, and which one was taken and why.

import { h, newId, number, table } from "./dom.js";
import { branches, TreeView } from "./tree_view.js";

const FIRST = 8; // what is shown at once; the others can be opened
const MOST_GROUP = 80; // characters of a final answer where it is only named: its candidate has all of it
const TITLES = {
  aggregators: "Candidates",
  search: "Hypotheses",
  uncertainty: "Samples that doubt was measured on",
};

export function candidatesView(sets, several) {
  return sets.map((set) => {
    const id = newId("candidates");
    const of = several ? `, answer ${set.answers.map((each) => each + 1).join(", ")}` : "";
    const why = reason(set);
    return h("section", { class: "candidates", "aria-labelledby": id },
      h("h3", { id }, `${TITLES[set.slot] ?? "Candidates"}: ${set.part}${of}`),
      h("p", { class: "quiet" }, `${set.rule}`),
      why ? h("p", { class: "why" }, why) : null,
      votesTable(set),
      set.graph ? [ranking(set), tree(set)] : cards(set),
      set.omitted ? h("p", { class: "quiet" }, `${number(set.omitted)} more are left out.`) : null);
  });
}

// Votes by group, the most first; null where there was no vote. Groups without votes count their members.
export function votes(set) {
  const groups = new Map();
  const voted = set.candidates.some((each) => each.votes !== null);
  for (const each of set.candidates.filter((one) => one.ended && (voted ? one.votes !== null : one.group))) {
    const known = groups.get(each.group) ?? { group: each.group, weight: 0, members: 0, taken: false };
    known.weight += voted ? each.votes : 1;
    known.members += 1;
    known.taken ||= each.answers.length > 0;
    groups.set(each.group, known);
  }
  return groups.size ? [...groups.values()].sort((a, b) => b.weight - a.weight) : null;
}

// One sentence, from what the answer says of its candidates; "" where it says nothing.
export function reason(set) {
  const taken = set.candidates.findIndex((each) => each.answers.length);
  const cancelled = set.candidates.filter((each) => !each.ended).length;
  const ended = set.candidates.length - cancelled;
  if (taken < 0) {
    const found = set.slot === "uncertainty" ? votes(set) : null;
    const meanings = found ? ` They have ${found.length} different meaning${found.length === 1 ? "" : "s"}.` : "";
    return `None of these ${set.candidates.length} is shown.${meanings}`;
  }
  if (set.slot === "search") {
    const shown = set.candidates.filter((each) => each.answers.length).length;
    return `The best ${shown === 1 ? "is" : `${shown} are`} shown, of ${number(set.candidates.length + set.omitted)} found.`;
  }
  const left = cancelled ? ` ${cancelled} not needed for the choice ${cancelled === 1 ? "was" : "were"} cancelled.` : "";
  const name = `Candidate ${taken + 1} is shown`;
  if (ended === 1) return `${name}: ${cancelled ? "it was the first to end" : "there is no other"}.${left}`;
  const { group, score } = set.candidates[taken];
  const found = set.candidates[taken].votes === null ? null : votes(set);
  const parts = [];
  let rivals = set.candidates.filter((each) => each.ended && each.score !== null);
  if (found) {
    const own = found.find((each) => each.group === group);
    const all = found.reduce((sum, each) => sum + each.weight, 0);
    parts.push(`its final answer, ${quoted(group)}, has ${number(own.weight)} of ${number(all)} votes`
      + (own.weight >= found[0].weight ? ", the most" : ""));
    rivals = rivals.filter((each) => each.group === group && each.votes > 0);
  }
  if (score !== null && rivals.length > 1) {
    const better = rivals.filter((each) => each.score > score).length;
    const among = found ? ` of the ${rivals.length} with it` : ` of ${rivals.length}`;
    parts.push(better ? `its score, ${number(score)}, is number ${better + 1}${among}`
      : `its score, ${number(score)}, is the greatest${among}`);
  }
  return parts.length ? `${name}: ${parts.join("; ")}.${left}` : `${name}.${left}`;
}

function quoted(text) { return text ? `“${short(text)}”` : "none"; }

function short(text) {
  const letters = [...text];
  return letters.length > MOST_GROUP ? `${letters.slice(0, MOST_GROUP).join("")}…` : text;
}

function votesTable(set) {
  const found = votes(set);
  if (!found) return null;
  const most = found[0].weight || 1;
  const voted = set.candidates.some((each) => each.votes !== null);
  const head = voted ? ["final answer", "votes", "candidates"] : ["meaning", "samples", "share"];
  return table(voted ? "Votes" : "Meanings", head, found.map((each) => [
    [h("span", { class: "named" }, short(each.group) || "none"), " ", each.taken ? h("span", { class: "badge good" }, "shown") : null],
    [h("meter", { min: 0, max: most, value: each.weight, "aria-label": `${head[1]} for ${short(each.group) || "none"}` }),
      ` ${number(each.weight)}`],
    voted ? each.members : `${Math.round((100 * each.members) / set.candidates.length)}%`,
  ]));
}

function facts(set, each) {
  const mean = each.logprob !== null && each.tokens > 0 ? each.logprob / each.tokens : null;
  const isScore = mean !== null && each.score !== null && Math.abs(each.score - mean) < 1e-6;
  return [
    each.group ? [set.slot === "uncertainty" ? "group" : "final answer", short(each.group)] : null,
    each.votes !== null ? ["votes", number(each.votes)] : null,
    each.score !== null ? ["score", number(each.score)] : null,
    each.logprob !== null ? ["log-probability", `${number(each.logprob)} nats`] : null,
    mean !== null && !isScore ? ["per token", `${number(mean)} nats`] : null,
    each.tokens ? ["tokens", number(each.tokens)] : null,
  ].filter(Boolean);
}

function badge(each) {
  if (each.answers.length) return h("span", { class: "badge good" }, "shown");
  return each.ended ? null : h("span", { class: "badge" }, "cancelled");
}

// The first few, and what is shown as an answer, at once; the others can be opened. `drawn` makes elements of places.
function few(set, drawn, label) {
  const places = [...set.candidates.keys()];
  const first = places.filter((place) => place < FIRST || set.candidates[place].answers.length);
  const others = places.filter((place) => !first.includes(place));
  return [drawn(first, label),
    others.length ? h("details", {}, h("summary", {}, `${number(others.length)} others`), drawn(others, `${label}, others`)) : null,
    set.score ? h("p", { class: "help" }, `Score: ${set.score}.`) : null];
}

function cards(set) {
  const name = set.slot === "uncertainty" ? "Sample" : "Candidate";
  const card = (place) => {
    const each = set.candidates[place];
    return h("li", { class: each.answers.length ? "taken" : undefined },
      h("div", { class: "cardhead" }, h("strong", {}, `${name} ${place + 1}`), " ", badge(each)),
      h("dl", {}, facts(set, each).map(([fact, value]) => [h("dt", {}, fact), h("dd", {}, value)])),
      h("pre", { class: "plain", tabindex: 0, role: "region", "aria-label": `Text of ${name.toLowerCase()} ${place + 1}` },
        each.text || "(no text)", each.cut ? " […]" : ""));
  };
  return few(set, (places, label) => h("ol", { class: "cards", "aria-label": label }, places.map(card)), `${name}s of ${set.part}`);
}

function ranking(set) {
  const row = (place) => {
    const each = set.candidates[place];
    return [
      `${place + 1}`, [h("span", { class: "said" }, each.text || "(no text)", each.cut ? " […]" : ""), " ",
        each.ended ? badge(each) : h("span", { class: "quiet" }, "not ended")],
      number(each.score), number(each.logprob), number(each.tokens),
    ];
  };
  const head = ["place", "text", "score", "log-probability, nats", "tokens"];
  return few(set, (places, label) => table(label, head, places.map(row)), "The best found");
}

function tree(set) {
  const { graph } = set;
  const merged = graph.edges.length > graph.nodes.length - 1;
  const left = graph.omitted ? ` ${number(graph.omitted)} tokens are left out.` : "";
  const what = merged
    ? `${number(graph.nodes.length - 1)} tokens spell ${number(graph.paths)} answers; where ways meet, the second names the first.`
    : "What hypotheses have in common stands there once; they branch where they part.";
  return h("div", {},
    h("p", { class: "quiet" }, `${what}${left} Each share is the probability of a branch, after what stands before it.`),
    new TreeView(branches(graph), ends(set), `Tree of ${set.part}`).element);
}

// By node, the candidates that end there, the best first.
export function ends(set) {
  const found = new Map();
  set.candidates.forEach((each, place) => {
    const last = each.path.at(-1);
    if (last === undefined) return;
    found.set(last, [...(found.get(last) ?? []), { rank: place + 1, score: each.score, answers: each.answers, path: each.path }]);
  });
  return found;
}
