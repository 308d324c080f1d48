// The catalogue of methods, from their own schemas.

import { fill, h, table } from "./dom.js";
import { get } from "./api.js";
import { bounds, resolve, shown } from "./schema_form.js";
import { encode } from "./share.js";

export async function methodsPage(root) {
  const methods = (await get("v1/methods")).data;
  fill(root, h("h1", {}, "Methods"),
    h("p", { class: "quiet" }, "Lossless: the output follows exactly the large model's own distribution."),
    methods.map((method) => h("details", { class: "card" },
      h("summary", {}, h("h2", {}, method.name),
        h("span", { class: method.lossless ? "badge good" : "badge" }, method.lossless ? "lossless" : "not lossless"),
        h("span", {}, method.summary)),
      parameters(method),
      h("p", {}, h("a", { href: `#/generate?state=${encode(trial(method.name))}` }, `Try ${method.name}`)))));
}

function trial(method) {
  return {
    mode: "chat", prompt: "What is 69*9-32*6+44?", sampling: { temperature: 0, logprobs: 3 },
    sides: [{ method, params: {} }],
  };
}

function parameters(method) {
  const needed = new Set(method.params.required ?? []);
  const rows = Object.entries(method.params.properties ?? {}).map(([name, schema]) => {
    const field = resolve(schema, method.params);
    const slot = method.params["x-parts"]?.[field["x-slot"]];
    const allowed = slot ? Object.keys(slot).join(", ") : (field.enum ?? []).join(", ") || bounds(field);
    return [h("code", {}, name), field["x-slot"] ?? field.type ?? "any", allowed || "–",
      needed.has(name) ? "needed" : shown(field.default), field.description ?? ""];
  });
  return rows.length
    ? table(`Parameters of ${method.name}`, ["parameter", "type", "allowed", "default", "meaning"], rows)
    : h("p", {}, "No parameters.");
}
