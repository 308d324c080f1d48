// The parts that a request chooses whatever its method, such as logits processors, as a form made from their schema.

import { h } from "./dom.js";
import { SchemaForm } from "./schema_form.js";

export class RequestParts {
  constructor(schema, label, onchange) {
    this.count = h("span", { class: "quiet" });
    this.form = new SchemaForm(schema, "decoding", () => { this.counted(); onchange(); });
    this.details = h("details", {}, h("summary", {}, label, " ", this.count), this.form.element);
    this.empty = this.form.fields.length === 0;
    this.element = h("fieldset", { "aria-label": label, hidden: this.empty }, this.details);
  }

  counted() {
    const count = Object.values(this.form.value).flat().filter((value) => value !== null).length;
    this.count.textContent = count ? `(${count})` : "";
  }

  get value() { return this.form.value; }

  set value(values) {
    this.form.value = values ?? {};
    this.counted();
    this.details.open = Object.keys(this.value).length > 0;
  }

  clear() { this.form.clear(); }

  // Shows a refusal at the field it names; false where it names none of these.
  refuse(error) {
    const field = error.field ? this.form.find(error.field) : null;
    if (!field) return false;
    this.details.open = true;
    field.error(error.message);
    field.focus();
    return true;
  }
}
