// A pasted message is searched for among the messages (docs/hooks.py), by its words: without the
// signs that would be operators, and without figures, paths, addresses and short words, which other
// messages have, too. Of what is typed, only words of one or two letters are left out: the theme
// would look for all words that begin with them. The input shows the text as it is.
{ // the theme has global names of its own
  const input = document.querySelector(".md-search__input")
  const text = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value")
  let isPasted = false

  Object.defineProperty(input, "value", {
    get() {
      const typed = text.get.call(input)
      const parts = typed.split(/\s+/).filter(part => !/[\d/\\]/.test(part))
      const words = parts.join(" ").match(/\w[\w.-]{2,}\w/g) || []
      isPasted &&= parts.length >= 3
      return isPasted ? `+message_text ${words.join(" ")}` : typed.replace(/\b\w{1,2} (?=.)/g, "")
    },
    set(typed) { text.set.call(input, typed) }
  })
  input.addEventListener("input", event => {
    if (!/^insertFrom(Paste|Drop)/.test(event.inputType)) return
    isPasted = true
    input.dispatchEvent(new Event("keyup")) // the theme searches then; a mouse releases no key
  })
}
