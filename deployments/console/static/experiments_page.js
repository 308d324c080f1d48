// Experiment reports: quality against cost, with the arms nobody beats joined by a line.

import { fill, h, newId, number, table } from "./dom.js";
import { get } from "./api.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [640, 380, 56, 20, 30, 44];

export async function experimentsPage(root) {
  let reports;
  try {
    reports = (await get("v1/experiments")).data;
  } catch (error) {
    if (error.status !== 404) throw error;
    fill(root, h("h1", {}, "Experiments"), h("p", {}, "This server shows no reports: ",
      h("code", {}, "console.experiments"), " of the configuration names the folder they are in."));
    return;
  }
  const body = h("div", {});
  const select = h("select", { id: newId("report"), onchange: () => open(body, select.value) },
    reports.map((report) => h("option", { value: report.name }, report.name)));
  fill(root, h("h1", {}, "Experiments"), reports.length
    ? [h("div", { class: "field short" }, h("label", { for: select.id }, "Report"), select), body]
    : h("p", {}, "There are no reports yet."));
  if (reports.length) await open(body, reports[0].name);
}

async function open(body, name) {
  // Of two chosen one after the other, the later one is shown, whichever comes first.
  body.dataset.report = name;
  try {
    const report = await get(`v1/experiments/${encodeURIComponent(name)}`);
    if (body.dataset.report !== name) return;
    const datasets = [...new Set(report.points.map((point) => point.dataset))];
    fill(body, h("h2", {}, report.title || name), datasets.map((dataset) => {
      const points = report.points.filter((point) => point.dataset === dataset).sort((a, b) => a.cost - b.cost);
      const best = frontier(points);
      return h("section", { class: "card" }, h("h3", {}, dataset || "All"), plot(points, best, dataset || "all"),
        table(`Arms on ${dataset || "all"}`, ["arm", "method", "quality", "interval", "cost", "unbeaten"],
          points.map((point) => [point.label, point.method, number(point.quality),
            point.quality_low === null ? "–" : `${number(point.quality_low)} to ${number(point.quality_high)}`,
            number(point.cost), best.has(point) ? "yes" : "no"])));
    }));
  } catch (error) {
    if (body.dataset.report !== name) return;
    fill(body, h("p", { class: "alert", role: "alert" }, error.message));
  }
}

// Points that no other is at least as good as, at no more cost.
export function frontier(points) {
  return new Set(points.filter((point) => !points.some((other) => other !== point && other.cost <= point.cost
    && other.quality >= point.quality && (other.cost < point.cost || other.quality > point.quality))));
}

function plot(points, best, name) {
  const most = Math.max(...points.map((point) => point.cost), 0.01) * 1.05;
  const lows = points.map((point) => point.quality_low ?? point.quality);
  const highs = points.map((point) => point.quality_high ?? point.quality);
  const [low, high] = [Math.min(...lows), Math.max(...highs)];
  const pad = Math.max(0.01, (high - low) * 0.08);
  const x = (cost) => LEFT + ((WIDTH - LEFT - RIGHT) * cost) / most;
  const y = (quality) => TOP + ((HEIGHT - TOP - BOTTOM) * (high + pad - quality)) / (high - low + 2 * pad);
  const line = [...best].map((point) => `${x(point.cost)},${y(point.quality)}`).join(" ");
  return h("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
    "aria-label": `Quality against cost on ${name}: ${points.length} arms, ${best.size} unbeaten` },
  axes(x, y, most, low, high),
  h("polyline", { class: "front", points: line }),
  points.map((point) => h("g", { class: best.has(point) ? "arm best" : "arm" },
    h("title", {}, `${point.label}: quality ${number(point.quality)}, cost ${number(point.cost)}`),
    point.quality_low === null ? null
      : h("line", { x1: x(point.cost), x2: x(point.cost), y1: y(point.quality_low), y2: y(point.quality_high) }),
    h("circle", { cx: x(point.cost), cy: y(point.quality), r: best.has(point) ? 6 : 4 }),
    best.has(point) ? h("text", {
      x: x(point.cost), y: y(point.quality) - 12, "text-anchor": x(point.cost) > WIDTH * 0.8 ? "end" : "middle",
    }, point.label) : null)));
}

function axes(x, y, most, low, high) {
  const costs = [0, 0.25, 0.5, 0.75, 1].map((share) => (share * most) / 1.05);
  const qualities = [low, (low + high) / 2, high];
  return h("g", { class: "axes" },
    costs.map((cost) => h("text", { x: x(cost), y: HEIGHT - 24, "text-anchor": "middle" }, number(cost, 2))),
    qualities.map((quality) => [
      h("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(quality), y2: y(quality) }),
      h("text", { x: LEFT - 8, y: y(quality) + 4, "text-anchor": "end" }, number(quality, 3))]),
    h("text", { x: (LEFT + WIDTH) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "cost, relative to the large model alone"));
}
