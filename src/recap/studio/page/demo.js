// The ready story of `recap studio --demo`: a fox comes, goes and comes back, and a line says what to look at.
import { request } from "./net.js";

const SCENE = "a beach by day", FOX = `a fox on ${SCENE}`;
// Every cut drops the recent frames, and the first picture has no fox: only the bank can bring it back.
// It is short, so that the fox is back within 20 s of opening the page where the model plays at half its rate.
// The seed is the first one, not chosen.
const STORY = { seed: 0, cues: [[1.3125, FOX], [3.5625, SCENE], [5.0625, FOX]], end: 10 };
const LINES = [
  "An empty beach. The memory keeps the first picture; its bank, to the right, takes in what is new.",
  "A fox comes, and its patches enter the bank: watch the wall fill.",
  "A cut: the recent frames are gone, and the first picture never had a fox. Only the bank still knows it.",
  "The fox is back. Is it the same one? Compare it with the wall. Lit is where the picture reads the bank.",
];
const YOURS = "Your turn: type what happens next, click a cut-out, or go back and branch.";

/** Begin the story; returns the name of its session. */
export async function beginDemo() {
  const { session } = await request("/sessions", { method: "POST", body: { prompt: SCENE, seed: STORY.seed } });
  // Together: a command waits for the block that is being generated, and one after the other each would wait for its own.
  await Promise.all(STORY.cues.map(([second, text]) => request(`/sessions/${session}/commands`, {
    method: "POST", body: { type: "prompt", text, at_s: second, cut: true },
  })));
  return session;
}

/** The role to show in the picture from the last prompt of the story on. */
export const demoRole = (prompts, second) => (prompts.length === LINES.length && second >= prompts.at(-1).second ? "bank" : null);

/** The line for a moment of the story; `prompts` are those of the session. */
export function demoLine(prompts, second) {
  if (prompts.length !== LINES.length || second >= STORY.end) return YOURS;
  return LINES[prompts.findLastIndex((cue) => cue.second <= second + 1e-3)] ?? YOURS;
}
