// A form from a JSON schema. What is left alone is not sent: the server's own setting holds then.

import { fill, h, newId } from "./dom.js";

// Looks through references, and takes the one choice that is not null.
export function resolve(schema, root) {
  let found = schema;
  if (found.$ref) {
    const { $ref, ...rest } = found;
    found = { ...root.$defs[$ref.slice("#/$defs/".length)], ...rest };
  }
  if (found.anyOf) {
    const { anyOf, ...rest } = found;
    const choices = anyOf.map((choice) => resolve(choice, root));
    const real = choices.filter((choice) => choice.type !== "null");
    const kinds = real.length === 1 ? real[0] : { choices: real };
    return { ...kinds, ...rest, nullable: real.length < choices.length };
  }
  return found;
}

const BOUNDS = [
  ["minimum", "at least"], ["exclusiveMinimum", "above"], ["maximum", "at most"], ["exclusiveMaximum", "below"],
  ["maxLength", "characters at most"], ["maxItems", "items at most"],
];

export function bounds(field) {
  const found = BOUNDS.filter(([key]) => field[key] !== undefined).map(([key, words]) => `${words} ${field[key]}`);
  return found.join(", ");
}

export function shown(value) {
  if (value === null || value === undefined) return "none";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function hint(field, fallback) {
  if (fallback === undefined) return field.default === undefined ? "needed" : `default: ${shown(field.default)}`;
  return `default: ${shown(fallback)}`;
}

// A number where it reads as one that is kept exactly; else the text as it stands, which the server refuses by the field's name.
export function parsed(text) {
  const trimmed = text.trim();
  const value = Number(trimmed);
  const kept = Number.isFinite(value) && (Math.abs(value) <= Number.MAX_SAFE_INTEGER || !/^[+-]?\d+$/.test(trimmed));
  return trimmed !== "" && kept ? value : text;
}

const NONE = "none";

function control(field, onchange) {
  // To be asked for by name: what is not sent may be another value, the schema's default or the pool's own.
  const none = field.nullable ? [[NONE, null]] : [];
  if (field.type === "boolean") return choice([["true", true], ["false", false], ...none], field, onchange);
  if (field.enum) return choice([...field.enum.map((each) => [String(each), each]), ...none], field, onchange);
  if (field.const !== undefined) return choice([[String(field.const), field.const], ...none], field, onchange);
  const read = (plain) => (text) => (none.length && text.trim() === NONE ? null : plain(text));
  if (field.type === "integer" || field.type === "number") return input(field, read(parsed), keyboard(field), onchange);
  if (field.type === "string") return input(field, read((text) => text), {}, onchange);
  return json(field, onchange);
}

// A phone's keyboard of digits has neither letters nor, often, a minus.
function keyboard(field) {
  return !field.nullable && (field.minimum ?? field.exclusiveMinimum ?? -1) >= 0 ? { inputmode: "decimal" } : {};
}

function choice(options, field, onchange) {
  const select = h("select", { onchange },
    h("option", { value: "" }, hint(field)), options.map(([label], place) => h("option", { value: String(place) }, label)));
  return {
    element: select,
    get: () => (select.value === "" ? undefined : options[Number(select.value)][1]),
    set: (value) => {
      const place = options.findIndex(([, each]) => each === value);
      select.value = place < 0 ? "" : String(place);
    },
  };
}

function input(field, read, props, onchange) {
  const element = h("input", {
    type: "text", autocomplete: "off", spellcheck: "false", placeholder: hint(field), oninput: onchange, ...props,
  });
  return {
    element,
    get: () => (element.value === "" ? undefined : read(element.value)),
    set: (value) => { element.value = value === undefined ? "" : value === null ? NONE : String(value); },
  };
}

function json(field, onchange) {
  const element = h("textarea", { rows: 2, spellcheck: "false", placeholder: hint(field), oninput: onchange });
  return {
    element,
    get: () => {
      if (element.value.trim() === "") return undefined;
      try { return JSON.parse(element.value); } catch { return element.value; }
    },
    set: (value) => { element.value = value === undefined ? "" : JSON.stringify(value); },
  };
}

// One labelled control. `path` is the name the server uses in refusals.
export class Field {
  constructor(path, label, schema, onchange) {
    this.path = path;
    this.control = control(schema, () => { this.error(""); onchange(); });
    const id = newId("field");
    this.control.element.id = id;
    this.message = h("p", { class: "fault", id: `${id}-fault`, hidden: true });
    const limits = [schema.description, bounds(schema), schema.nullable ? `${NONE}: no value` : ""].filter(Boolean).join("; ");
    const help = limits ? h("p", { class: "help", id: `${id}-help` }, limits) : null;
    this.control.element.setAttribute("aria-describedby", help ? `${id}-help ${id}-fault` : `${id}-fault`);
    this.element = h("div", { class: "field" }, h("label", { for: id }, label), this.control.element, this.message, help);
  }

  get value() { return this.control.get(); }

  set value(value) { this.control.set(value); }

  focus() { this.control.element.focus(); }

  error(text) {
    this.message.textContent = text;
    this.message.hidden = !text;
    if (text) this.control.element.setAttribute("aria-invalid", "true");
    else this.control.element.removeAttribute("aria-invalid");
  }

  clear() { this.error(""); }
}

// A part chosen by name, with the fields of its own parameters; as JSON where a list of parts is meant.
class PartField {
  constructor(path, label, schema, root, onchange) {
    this.path = path;
    this.parts = root["x-parts"][schema["x-slot"]] ?? {};
    this.root = root;
    this.onchange = onchange;
    this.inner = null;
    const several = schema.choices ? ["as JSON"] : [];
    this.name = new Field(path, label, {
      enum: [...Object.keys(this.parts), ...several], default: schema.default, description: schema.description,
      nullable: schema.nullable,
    }, () => { this.show(); onchange(); });
    this.body = h("div", { class: "nested", hidden: true });
    this.element = h("div", {}, this.name.element, this.body);
  }

  show() {
    const name = this.name.value;
    if (name === undefined || name === null) this.inner = null;
    else if (name === "as JSON") this.inner = new Field(this.path, "JSON", { default: [] }, this.onchange);
    else {
      const schema = this.parts[name];
      this.inner = new SchemaForm({ ...schema, "x-parts": this.root["x-parts"] }, this.path, this.onchange);
    }
    const empty = this.inner instanceof SchemaForm && this.inner.fields.length === 0;
    this.body.hidden = this.inner === null || empty;
    fill(this.body, this.inner?.element);
  }

  get value() {
    const name = this.name.value;
    if (name === undefined || name === null) return name;
    const inner = this.inner.value;
    if (name === "as JSON") return inner;
    return Object.keys(inner).length ? { name, ...inner } : name;
  }

  set value(value) {
    if (Array.isArray(value)) this.name.value = "as JSON";
    else this.name.value = typeof value === "object" && value !== null ? value.name : value;
    this.show();
    if (Array.isArray(value)) this.inner.value = value;
    else if (this.inner && typeof value === "object") this.inner.value = value;
  }

  focus() { this.name.focus(); }

  error(text) { this.name.error(text); }

  clear() {
    this.error("");
    if (this.inner) this.inner.clear();
  }

  find(path) { return (this.inner instanceof SchemaForm ? this.inner.find(path) : null) ?? this; }
}

// An object with fields of its own; where it may be left out or be none, whether it is given is chosen first.
class RecordField {
  constructor(path, label, schema, root, onchange, needed = false) {
    this.path = path;
    const inner = { ...root, properties: schema.properties };
    this.form = new SchemaForm(inner, path, onchange);
    this.body = h("div", { class: "nested", hidden: !needed }, this.form.element);
    this.given = new Field(path, label, {
      enum: ["given"], default: schema.default, description: schema.description, nullable: schema.nullable,
    }, () => { this.show(); onchange(); });
    this.given.element.hidden = needed;
    this.needed = needed;
    this.element = h("div", { role: "group", "aria-label": label }, this.given.element, this.body);
  }

  show() { this.body.hidden = !this.needed && this.given.value !== "given"; }

  get value() {
    const given = this.needed ? "given" : this.given.value;
    return given === "given" ? this.form.value : given;
  }

  set value(value) {
    const given = typeof value === "object" && value !== null;
    this.given.value = given ? "given" : value;
    this.form.value = given ? value : {};
    this.show();
  }

  focus() { (this.needed ? this.form.fields[0]?.[1] : this.given)?.focus(); }

  error(text) {
    if (this.needed) this.form.fields[0]?.[1].error(text);
    else this.given.error(text);
  }

  clear() {
    this.given.clear();
    this.form.clear();
  }

  find(path) { return this.form.find(path) ?? this; }
}

// Rows in the order in which they are sent, parts or objects. A row's place is in the names of its fields, so all are
// made again when one moves.
class RowList {
  constructor(path, label, schema, root, onchange) {
    this.path = path;
    this.label = label;
    this.one = schema["x-slot"] ? { "x-slot": schema["x-slot"] } : resolve(schema.items, root);
    this.most = schema.maxItems ?? Infinity;
    this.root = root;
    this.onchange = onchange;
    this.list = h("ol", { class: "parts" });
    this.more = h("button", { type: "button", onclick: () => this.add() }, `Add to ${label}`);
    this.message = h("p", { class: "fault", hidden: true });
    const preset = Array.isArray(schema.default) && schema.default.length ? hint(schema) : "";
    const words = [schema.description, preset].filter(Boolean).join("; ");
    const help = words ? h("p", { class: "help" }, words) : null;
    this.element = h("div", { class: "field", role: "group", "aria-label": label }, this.list, this.more, this.message, help);
    this.value = [];
  }

  get value() {
    const given = this.rows.map((row) => row.value).filter((value) => value !== undefined);
    return given.length ? given : undefined;
  }

  set value(values) {
    this.rows = (Array.isArray(values) ? values : []).map((value, place) => {
      const Row = this.one["x-slot"] ? PartField : RecordField;
      const row = new Row(`${this.path}.${place}`, `${this.label} ${place + 1}`, this.one, this.root, this.onchange, true);
      row.value = value ?? undefined;
      return row;
    });
    fill(this.list, this.rows.map((row, place) => h("li", {}, row.element, this.buttons(place))));
    this.more.hidden = this.rows.length >= this.most;
    this.error("");
  }

  buttons(place) {
    const button = (words, act) => h("button", { type: "button", "aria-label": `${words} ${this.label} ${place + 1}`, onclick: act }, words);
    return h("div", { class: "buttons" },
      place > 0 ? button("Earlier", () => this.move(place, place - 1)) : null,
      place + 1 < this.rows.length ? button("Later", () => this.move(place, place + 1)) : null,
      button("Remove", () => this.remove(place)));
  }

  add() {
    this.value = [...this.rows.map((row) => row.value), undefined];
    this.rows.at(-1).focus();
    this.onchange();
  }

  move(from, to) {
    const values = this.rows.map((row) => row.value);
    values.splice(to, 0, ...values.splice(from, 1));
    this.value = values;
    this.rows[to].focus();
    this.onchange();
  }

  remove(place) {
    this.value = this.rows.map((row) => row.value).toSpliced(place, 1);
    (this.rows[place] ?? this.rows.at(-1) ?? this.more).focus();
    this.onchange();
  }

  focus() { (this.rows[0] ?? this.more).focus(); }

  error(text) {
    this.message.textContent = text;
    this.message.hidden = !text;
  }

  clear() {
    this.error("");
    this.rows.forEach((row) => row.clear());
  }

  // Places are of the parts that are sent: rows in which none is chosen are not.
  find(path) {
    if (path === this.path) return this;
    const place = Number(path.slice(this.path.length + 1).split(".")[0]);
    const row = this.rows.filter((each) => each.value !== undefined)[place];
    if (!row) return this;
    return row.find(path.replace(`${this.path}.${place}`, row.path));
  }
}

function made(path, name, field, root, onchange) {
  const parts = field["x-slot"] && root["x-parts"];
  const rows = field.type === "array" && (parts || resolve(field.items ?? {}, root).properties);
  const Kind = rows ? RowList : parts ? PartField : field.type === "object" && field.properties ? RecordField : Field;
  return Kind === Field ? new Field(path, name, field, onchange) : new Kind(path, name, field, root, onchange);
}

export class SchemaForm {
  constructor(root, prefix, onchange) {
    this.fields = Object.entries(root.properties ?? {}).map(([name, schema]) => {
      return [name, made(`${prefix}.${name}`, name, resolve(schema, root), root, onchange)];
    });
    this.element = h("div", { class: "fields" }, this.fields.map(([, field]) => field.element));
  }

  get value() {
    const given = this.fields.map(([name, field]) => [name, field.value]).filter(([, value]) => value !== undefined);
    return Object.fromEntries(given);
  }

  set value(values) {
    for (const [name, field] of this.fields) field.value = values?.[name];
  }

  // The field a refusal names: the one whose path is the longest beginning of it.
  find(path) {
    const fits = this.fields.map(([, field]) => field)
      .filter((field) => path === field.path || path.startsWith(`${field.path}.`));
    const best = fits.sort((a, b) => b.path.length - a.path.length)[0];
    return best?.find ? best.find(path) : best ?? null;
  }

  clear() {
    for (const [, field] of this.fields) field.clear();
  }
}
