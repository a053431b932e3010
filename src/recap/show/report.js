"use strict";
// One button opens all folded tables, for a search in the page or before it is printed, and closes them again.
const button = document.getElementById("unfold");
const folds = [...document.querySelectorAll("details")];
button.hidden = folds.length === 0;
button.addEventListener("click", () => {
  const open = folds.some((fold) => !fold.open);
  for (const fold of folds) fold.open = open;
  button.textContent = open ? "Fold all tables" : "Unfold all tables";
});
