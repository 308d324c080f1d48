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

  find(path) { return (this.inner instanceof SchemaForm ? this.inner.find(path) : null) ?? this; }
}

export class SchemaForm {
  constructor(root, prefix, onchange) {
    this.fields = Object.entries(root.properties ?? {}).map(([name, schema]) => {
      const path = `${prefix}.${name}`;
      const field = resolve(schema, root);
      const made = field["x-slot"] && root["x-parts"]
        ? new PartField(path, name, field, root, onchange)
        : new Field(path, name, field, onchange);
      return [name, made];
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
    for (const [, field] of this.fields) {
      field.error("");
      if (field.inner instanceof SchemaForm) field.inner.clear();
    }
  }
}
