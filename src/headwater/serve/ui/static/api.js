// Requests to the server: the admin key, where there is one, travels as a header and is kept for this tab only.

const STORED = "headwater-admin-key";
const QUIET_MS = 9000; // the stream has a beat every 2.5 s
const WAITS_MS = [500, 1000, 2000, 4000, 5000];

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const needsKey = (error) => error instanceof Refused && (error.status === 401 || error.status === 403);

export const keepKey = (key) => sessionStorage.setItem(STORED, key);
export const hasKey = () => sessionStorage.getItem(STORED) !== null;

function headers(more) {
  const key = sessionStorage.getItem(STORED);
  return key === null ? more : { ...more, Authorization: `Bearer ${key}` };
}

async function checked(response) {
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not this server's own words: the status says it
  }
  throw new Refused(response.status, message);
}

export async function get(path) {
  return (await checked(await fetch(path, { headers: headers({}), cache: "no-store" }))).json();
}

export async function post(path, text) {
  const asked = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: text };
  return (await checked(await fetch(path, asked))).json();
}

// The server's events, for as long as the page lives: connects again when they stop. EventSource cannot send a header.
export class Stream {
  constructor(path, { onEvent, onState, onKeyNeeded }) {
    Object.assign(this, { path, onEvent, onState, onKeyNeeded, failures: 0, timer: null, abort: null, again: false });
  }

  start() {
    clearTimeout(this.timer);
    if (this.abort === null) this.run();
  }

  stop() {
    clearTimeout(this.timer);
    if (this.abort !== null) this.abort.abort("stopped");
  }

  restart() {
    this.again = true;
    this.stop();
  }

  async run() {
    const abort = (this.abort = new AbortController());
    let quiet = 0;
    const alive = () => {
      clearTimeout(quiet);
      quiet = setTimeout(() => abort.abort("quiet"), QUIET_MS);
    };
    try {
      alive();
      const response = await checked(
        await fetch(this.path, { headers: headers({ Accept: "text/event-stream" }), signal: abort.signal, cache: "no-store" }),
      );
      await this.read(response.body, alive);
      this.failed("The server ended the stream");
    } catch (error) {
      if (abort.signal.reason === "stopped") this.onState("paused");
      else if (needsKey(error)) this.onKeyNeeded(error);
      else this.failed(error instanceof Refused ? error.message : "The server cannot be reached");
    } finally {
      clearTimeout(quiet);
      this.abort = null;
    }
    if (this.again) {
      this.again = false;
      this.start();
    }
  }

  async read(body, alive) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      alive();
      text += value;
      const events = text.split("\n\n");
      text = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        this.failures = 0;
        this.onEvent(JSON.parse(data));
      }
    }
  }

  failed(why) {
    const wait = WAITS_MS[Math.min(this.failures++, WAITS_MS.length - 1)];
    this.onState("lost", why);
    this.timer = setTimeout(() => this.start(), wait);
  }
}
