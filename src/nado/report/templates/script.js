"use strict";
const tip = document.getElementById("tip");
const hide = () => { tip.hidden = true; };
// The browser's own title would come late, and never where there is no mouse.
document.querySelectorAll(".t[title]").forEach((token) => {
  token.dataset.tip = token.title;
  token.removeAttribute("title");
  token.tabIndex = -1;
});
const show = (token) => {
  tip.textContent = token.dataset.tip.replaceAll(" · ", "\n");
  tip.hidden = false;
  const box = token.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const below = box.bottom + 22 + tip.offsetHeight < window.innerHeight;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = (below ? box.bottom + 18 : box.top - tip.offsetHeight - 8) + "px";
  token.setAttribute("aria-describedby", "tip");
};
const tokenOf = (event) => event.target.closest && event.target.closest(".t[data-tip]");
for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, (event) => { const token = tokenOf(event); if (token) show(token); else hide(); });
}
document.addEventListener("focusout", hide);
document.addEventListener("scroll", hide, { passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hide();
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const text = step && event.target.closest(".text");
  if (!text) return;
  const tokens = [...text.querySelectorAll(".t")];
  const next = tokens[tokens.indexOf(event.target) + step];
  if (next) { event.preventDefault(); next.focus(); }
});
