/* Names and roles for what gradio leaves without, or gives a wrong one; whenever it draws anew. */
{
  const MENDED = [
    ["#chat .examples", "role", "group"], // buttons are no items of a list
    ["#chat .examples", "aria-label", "Examples"],
    // A button within what is clicked on as a whole.
    ["#chat .thought-group .title button", "inert", ""],
    ["#box .thumbnail-wrapper", "role", "group"], // beside a button, in no list
    ["#box textarea", "aria-label", "Message"],
    ["#box .full-container", "aria-label", "Your message"],
    ["#box .submit-button", "aria-label", "Send"],
    ["#box .stop-button", "aria-label", "Stop"],
    ["#chat button[title=Retry]", "aria-label", "Answer again"],
    ["#chat button[title=Undo]", "aria-label", "Take the question back"],
    ["#status", "aria-live", "polite"],
    ["#conversations .toggle-button", "aria-label", "Conversations"],
    ["#side .toggle-button", "aria-label", "Memory and settings"],
  ];
  const mend = () => {
    for (const [of, name, value] of MENDED)
      for (const each of document.querySelectorAll(of))
        if (each.getAttribute(name) !== value) each.setAttribute(name, value);
  };
  addEventListener("DOMContentLoaded", () => {
    new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
  });
}
