// What is on the page, in the address's fragment: never sent to the server, never with a key.

export function encode(state) {
  const raw = new TextEncoder().encode(JSON.stringify(state));
  let binary = "";
  for (const byte of raw) binary += String.fromCharCode(byte);
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

// Null where it is none of ours: a cut-off link opens an empty page, not a broken one.
export function decode(text) {
  try {
    const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    const state = JSON.parse(new TextDecoder().decode(Uint8Array.from(binary, (each) => each.charCodeAt(0))));
    return typeof state === "object" && state !== null && !Array.isArray(state) ? state : null;
  } catch {
    return null;
  }
}
