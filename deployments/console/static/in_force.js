// What a request runs with, as far as it can be known before the server says so: as the engine lays it together.

// `model` is of /v1/models; `name` empty: the pool's own method. Null where a router chooses.
export function inForce(methods, model, name, given) {
  const chosen = name || (model.routed ? "" : model.default_method);
  const properties = schemaOf(methods, chosen);
  if (!properties) return null;
  const defaults = Object.fromEntries(Object.entries(properties).map(([key, each]) => [key, each.default]));
  const own = { ...(chosen === model.default_method ? model.default_params : {}) };
  // A threshold by hand replaces the pool's calibration.
  if (given.threshold !== undefined) delete own.calibration;
  return { method: chosen, params: { ...defaults, ...own, ...given } };
}

// What can be drawn among entropies: a threshold in bits that is known, and the window of the mean.
export function switchRule(methods, force) {
  const properties = force && schemaOf(methods, force.method);
  const none = { threshold: null, window: 1 };
  if (!properties) return none;
  const { threshold, window, calibration } = force.params;
  // Units stand at the end of a description. A calibrated threshold is in a file of the pool's.
  const inBits = /\bbits$/.test(properties.threshold?.description ?? "");
  return {
    threshold: inBits && !calibration && typeof threshold === "number" ? threshold : none.threshold,
    window: Number.isInteger(window) && window > 0 ? window : none.window,
  };
}

function schemaOf(methods, name) {
  return methods.find((each) => each.name === name)?.params.properties;
}
