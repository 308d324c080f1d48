// What pools, replicas and caches hold now: /v1/status, asked again while the page is looked at.

import { bytes, fill, h, number, table } from "./dom.js";
import { get } from "./api.js";
import { seconds } from "./meters.js";

const EVERY_MS = 2000;

function marked(body) {
  const selection = getSelection();
  return selection.type === "Range" && body.contains(selection.anchorNode);
}

function live(title, draw) {
  return async (root) => {
    const body = h("div", {});
    const state = h("p", { class: "quiet" });
    const aborter = new AbortController();
    let timer = 0;
    let asOf = "";
    const ask = async () => {
      if (!document.hidden) {
        try {
          const status = await get("v1/status", aborter.signal);
          // Not under somebody who reads with the keyboard or has marked something: both would be lost.
          if (!body.contains(document.activeElement) && !marked(body)) {
            fill(body, draw(status));
            asOf = new Date().toLocaleTimeString();
            state.textContent = `As of ${asOf}.`;
          } else state.textContent = `As of ${asOf}; it stands still while you are in it.`;
        } catch (error) {
          if (error.name === "AbortError") return;
          state.textContent = asOf ? `Not up to date, as of ${asOf}: ${error.message}.` : `Nothing to show: ${error.message}.`;
        }
      }
      timer = setTimeout(ask, EVERY_MS);
    };
    fill(root, h("h1", {}, title), state, body);
    await ask();
    return () => { aborter.abort(); clearTimeout(timer); };
  };
}

export const poolsPage = live("Pools and replicas", (status) => [
  Object.entries(status.errors).map(([pool, why]) =>
    h("section", { class: "card" }, h("h2", {}, pool), h("p", { class: "alert" }, why))),
  Object.entries(status.pools).map(([pool, replicas]) => h("section", { class: "card" },
    h("h2", {}, pool, h("span", { class: "quiet" }, ` ${replicas.length} replica${replicas.length === 1 ? "" : "s"}`)),
    replicas.map((replica, place) => oneReplica(`${pool}, replica ${place + 1}`, replica)),
    replicas.length ? null : h("p", {}, "It sleeps: the next request starts a replica."))),
]);

function oneReplica(name, replica) {
  const facts = [
    ["requests", replica.requests], ["waiting", `${replica.waiting} (${seconds(replica.waiting_s)} of work)`],
    ["speed", `${number(replica.tokens_per_second)} tokens/s`],
    ["blocks", `${replica.used_blocks} used, ${replica.cached_blocks} cached of ${replica.total_blocks}`],
    ["runs at", replica.place || "this process"],
  ];
  return h("div", {},
    h("dl", { class: "facts" }, facts.map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)])),
    replica.members.length ? table(name,
      ["model", "sequences", "blocks used", "of", "waiting", "step", "restarts"],
      replica.members.map((member) => [member.model, member.sequences,
        [h("meter", { min: 0, max: Math.max(1, member.total_blocks), value: member.used_blocks,
          "aria-label": `blocks of ${member.model}` }), ` ${member.used_blocks}`],
        member.total_blocks, member.waiting, seconds(member.step_seconds), member.restarts])) : null);
}

export const cachePage = live("Prefix cache", (status) => Object.entries(status.pools).map(([pool, replicas]) =>
  h("section", { class: "card" }, h("h2", {}, pool),
    replicas.map((replica, place) => {
      const cached = replica.total_blocks ? replica.cached_blocks / replica.total_blocks : 0;
      const own = h("p", {}, `Own blocks: ${replica.cached_blocks} of ${replica.total_blocks} reusable `,
        h("meter", { min: 0, max: 1, value: cached, "aria-label": "reusable blocks" }));
      return [h("h3", {}, `Replica ${place + 1}`), own,
        replica.cache ? oneCache(replica.cache) : h("p", { class: "quiet" }, "It has no shared prefix store.")];
    }))));

function oneCache(cache) {
  const where = Object.entries(cache.tokens);
  const found = where.reduce((sum, [, count]) => sum + count, 0);
  return h("div", {},
    h("p", {}, `${cache.servers.join(", ") || "Store"}: `, h("strong", {}, cache.health), `; ${cache.lookups} lookups, ${cache.writes} values written, `
      + `${bytes(cache.bytes_read)} read, ${bytes(cache.bytes_written)} written, ${bytes(cache.memory_bytes)} in memory.`),
    table("Tokens found, by where", ["where", "tokens", "share"], where.map(([name, count]) => [name, count,
      [h("meter", { min: 0, max: Math.max(1, found), value: count, "aria-label": `share of ${name}` }),
        ` ${found ? Math.round((100 * count) / found) : 0}%`]])),
    troubles("Faults that became misses", cache.faults), troubles("Not written", cache.dropped));
}

function troubles(title, counts) {
  const rows = Object.entries(counts).filter(([, count]) => count);
  return rows.length ? table(title, ["kind", "times"], rows) : null;
}
