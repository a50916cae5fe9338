/* As a page is left, gradio ends the stream that it listens to and then complains, to whoever looks,
   that the connection was lost. The browser ends it by itself, and without a word. */
window.addEventListener("beforeunload", (event) => event.stopImmediatePropagation());
