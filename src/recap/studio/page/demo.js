// What the ready story of `recap studio --demo` says to a newcomer, one line per prompt of the story.
const LINES = [
  "An empty beach. The memory keeps the first picture; its bank, to the right, takes in what is new.",
  "A fox comes, and its patches enter the bank: watch the wall fill.",
  "A cut: the recent frames are gone, and the first picture never had a fox. Only the bank still knows it.",
  "The prompt asks for a fox again. Is it the same one? It was read from the bank.",
];
const YOURS = "Your turn: type what happens next, click a cut-out, or go back and branch.";

/** The line for a moment of the story; `prompts` are those of the session, `end` is where the story ends. */
export function demoLine(prompts, second, end) {
  if (prompts.length > LINES.length || second >= end) return YOURS;
  return LINES[prompts.findLastIndex((cue) => cue.second <= second + 1e-3)] ?? YOURS;
}
