// Whose key this is, what it may do, what it has used; for operators, everybody's.

import { fill, h, number, table } from "./dom.js";
import { get } from "./api.js";

export async function tenantPage(root) {
  let own;
  try {
    own = await get("v1/tenant");
  } catch (error) {
    if (error.status !== 404) throw error;
    fill(root, h("h1", {}, "Tenant"),
      h("p", {}, "This server has no tenants: everybody is one, without limits. The section ",
        h("code", {}, "access"), " of the configuration adds them."));
    return;
  }
  fill(root, h("h1", {}, "Tenant"), one(own));
  try {
    const others = (await get("v1/tenants")).data.filter((each) => each.tenant !== own.tenant);
    if (others.length) root.append(h("h2", {}, "All tenants"), ...others.map(one));
  } catch (error) {
    if (![401, 403, 404].includes(error.status)) throw error;
  }
}

function one(tenant) {
  return h("section", { class: "card" }, h("h2", {}, tenant.tenant),
    ["limits", "left", "usage"].map((part) => facts(`${tenant.tenant}: ${part}`, tenant[part])));
}

function facts(title, values) {
  const rows = Object.entries(values ?? {}).map(
    ([name, value]) => [name.replaceAll("_", " "), cell(value, name === "sharing" ? "as configured" : "no limit")]);
  return rows.length ? table(title, ["what", "value"], rows) : null;
}

function cell(value, absent) {
  if (value === null || value === undefined) return absent;
  if (typeof value === "number") return number(value, 6);
  if (Array.isArray(value)) return value.length ? value.join(", ") : "none";
  if (typeof value === "object") {
    return Object.entries(value).map(([name, each]) => `${name}: ${number(each, 6)}`).join(", ") || "none";
  }
  return String(value);
}
