// Talks to the server: requests for sessions and casts, and one socket per session that is opened again when it falls.
/** An address of the API, for what a browser fetches by itself: pictures, downloads. */
export const address = (path) => `v1${path}`;

export class Refused extends Error {}

/** Return the message of an error of the server, whatever form it has. */
export function wordsOf(body, status = 0) {
  const error = body?.error ?? body;
  if (typeof error === "string") return error;
  if (error?.text) return error.text;
  if (Array.isArray(body?.detail)) return body.detail.map((part) => `${(part.loc || []).slice(1).join(".")}: ${part.msg}`).join("; ");
  if (typeof body?.detail === "string") return body.detail;
  return status ? `The server answered with ${status}.` : "Something went wrong, and the server did not say what.";
}

export async function request(path, { method = "GET", body, raw = false, file } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  // The server recognises the kind of file by its bytes.
  if (file) headers["Content-Type"] = "application/octet-stream";
  let answer;
  try {
    answer = await fetch(`v1${path}`, { method, headers, body: file ?? (body === undefined ? undefined : JSON.stringify(body)) });
  } catch {
    throw new Refused("The studio does not answer. Is `recap studio` still running?");
  }
  if (!answer.ok) throw new Refused(wordsOf(await answer.json().catch(() => null), answer.status));
  if (raw) return answer.arrayBuffer();
  return answer.status === 204 ? null : answer.json().catch(() => null);
}

/** What the address of the page says after the #. */
export const inHash = (name) => new URLSearchParams(location.hash.slice(1)).get(name);

/** Open a session that may be on disk only; one that is open already stays so. */
export const openSession = (id) => request(`/sessions/${encodeURIComponent(id)}/open`, { method: "POST" });

const LONGEST_WAIT_MS = 5000;

/** One session's socket. `on` has a function per type of message; `on.media(header, bytes)` gets what is binary. */
export class Stream {
  constructor(id, on) {
    this.id = id;
    this.on = on;
    this.waiting = new Map();
    this.number = 0;
    this.tries = 0;
    this.closed = false;
    this.open();
  }

  open() {
    const url = new URL(address(`/sessions/${encodeURIComponent(this.id)}/stream`), location.href);
    url.hash = "";
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    this.socket = new WebSocket(url);
    this.socket.binaryType = "arraybuffer";
    this.socket.onopen = () => { this.tries = 0; this.on.link?.(true); };
    this.socket.onmessage = ({ data }) => (typeof data === "string" ? this.text(data) : this.binary(data));
    this.socket.onclose = (event) => {
      for (const { reject } of this.waiting.values()) reject(new Refused("The connection was lost before the answer came."));
      this.waiting.clear();
      if (this.closed) return;
      // The server closes a stream with this code when there is nothing to come back to, and has sent the reason.
      const again = event.code !== 1008;
      this.on.link?.(false, { reason: event.reason, again });
      if (again) this.timer = setTimeout(() => this.open(), Math.min(LONGEST_WAIT_MS, 400 * 2 ** this.tries++));
    };
  }

  text(data) {
    const message = JSON.parse(data);
    const asked = message.id === undefined ? undefined : this.waiting.get(message.id);
    if (asked && (message.type === "done" || message.type === "error")) {
      this.waiting.delete(message.id);
      if (message.type === "done") asked.resolve(message);
      else asked.reject(new Refused(wordsOf(message)));
      return;
    }
    this.on[message.type]?.(message);
  }

  binary(data) {
    const length = new DataView(data).getUint32(0);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
    this.on.media?.(header, new Uint8Array(data, 4 + length));
  }

  get ready() { return this.socket.readyState === WebSocket.OPEN; }

  /** Send without waiting for an answer; nothing happens while there is no connection. */
  send(type, fields = {}) {
    if (this.ready) this.socket.send(JSON.stringify({ v: 1, type, id: String(++this.number), ...fields }));
  }

  /** Send a command; the promise resolves to the server's answer, or is rejected with its message. */
  ask(type, fields = {}) {
    if (!this.ready) return Promise.reject(new Refused("There is no connection to the studio right now."));
    const id = String(++this.number);
    const answer = new Promise((resolve, reject) => this.waiting.set(id, { resolve, reject }));
    this.socket.send(JSON.stringify({ v: 1, type, id, ...fields }));
    return answer;
  }

  /** Reconnect, to get the whole state once more. */
  again() {
    this.socket.onclose = this.socket.onmessage = null;
    this.socket.close();
    for (const { resolve } of this.waiting.values()) resolve({});
    this.waiting.clear();
    this.open();
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    this.socket.close();
  }
}
