// Which method answers, and its parameters, as a form made from its schema.

import { fill, h, newId } from "./dom.js";
import { SchemaForm } from "./schema_form.js";

export class MethodPicker {
  constructor(methods, label, onchange) {
    this.methods = methods;
    this.onchange = onchange;
    this.form = null;
    const id = newId("method");
    this.select = h("select", { id, onchange: () => { this.show(); onchange(); } },
      h("option", { value: "" }, "the pool's own"),
      methods.map((method) => h("option", { value: method.name }, method.name)));
    this.summary = h("p", { class: "help" });
    this.fault = h("p", { class: "fault", hidden: true });
    this.count = h("span", { class: "quiet" });
    this.fields = h("div", {});
    this.details = h("details", { hidden: true }, h("summary", {}, "Parameters ", this.count), this.fields);
    this.element = h("fieldset", {},
      h("legend", {}, label),
      h("div", { class: "field" }, h("label", { for: id }, "Method"), this.select, this.fault, this.summary),
      this.details);
    this.show();
  }

  show() {
    const method = this.methods.find((each) => each.name === this.select.value);
    this.form = method ? new SchemaForm(method.params, "decoding.params", () => { this.counted(); this.onchange(); }) : null;
    this.summary.textContent = method
      ? `${method.summary} ${method.lossless ? "Lossless: the large model's own distribution." : "Not lossless."}`
      : "What the pool is configured with, or its routing.";
    this.details.hidden = !this.form?.fields.length;
    fill(this.fields, this.form?.element);
    this.counted();
    this.error("");
  }

  counted() {
    const count = Object.keys(this.form?.value ?? {}).length;
    this.count.textContent = count ? `(${count} set)` : "";
  }

  get value() {
    const params = this.form?.value ?? {};
    return { method: this.select.value, params };
  }

  set value({ method, params }) {
    this.select.value = this.methods.some((each) => each.name === method) ? method : "";
    this.show();
    if (this.form) {
      this.form.value = params;
      this.details.open = Object.keys(params ?? {}).length > 0;
      this.counted();
    }
  }

  error(text) {
    this.fault.textContent = text;
    this.fault.hidden = !text;
  }

  clear() {
    this.error("");
    this.form?.clear();
  }

  // Shows a refusal at the field it names; false where it names none of these.
  refuse(error) {
    if (error.field === "decoding.method") {
      this.error(error.message);
      this.select.focus();
      return true;
    }
    const field = error.field ? this.form?.find(error.field) : null;
    if (!field) return false;
    this.details.open = true;
    field.error(error.message);
    field.focus();
    return true;
  }
}
