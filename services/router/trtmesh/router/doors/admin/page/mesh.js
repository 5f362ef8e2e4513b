// What the router says: snapshots once a second, and answers to calls.

const TOKEN = "trtmesh admin token";
const AGAIN_MS = 1000;

export const token = {
  get: () => sessionStorage.getItem(TOKEN) ?? "",
  set: (value) => (value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN)),
};

export function headers(more = {}) {
  const held = token.get();
  return held ? { Authorization: `Bearer ${held}`, ...more } : more;
}

// The data of server-sent events, as they come.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

export async function problemOf(response) {
  try {
    const { error } = await response.json();
    return error.message ?? error;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

// Calls a method of the admin API. Throws an Error with the router's sentence.
export async function call(method, body = {}) {
  const response = await fetch(`console/calls/${method}`,
    { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) });
  if (!response.ok) throw new Error(await problemOf(response));
  return response.json();
}

// Follows the snapshots for ever. `onProblem` gets the status and the reason of an interruption.
export async function follow(onSnapshot, onProblem, signal) {
  while (!signal.aborted) {
    try {
      const response = await fetch("console/feed", { headers: headers(), signal });
      if (response.ok) for await (const data of events(response)) onSnapshot(JSON.parse(data));
      onProblem(response.status, response.ok ? "the router ended" : await problemOf(response));
    } catch {
      if (!signal.aborted) onProblem(0, "the router does not answer");
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}
