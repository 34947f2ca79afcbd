# Names each sentence of more than 25 words in the messages of errors in Rust, #[error("…")]: FILE:LINE: the rule, and
# how the sentence begins. What is put in, `{…}`, is one word, as is what stands between backquotes.

function check(    count, words, sentences, i, left) {
    gsub(/\\"/, "'", text); gsub(/`[^`]*`/, "CODE", text); gsub(/\{[^}]*\}/, "IN", text)
    gsub(/[.!?:]+["')]* /, "&\n", text)
    left = split(text, sentences, "\n")
    for (i = 1; i <= left; i++) {
        count = split(sentences[i], words)
        if (count > 25) print FILENAME ":" line ": a sentence of " count " words (at most 25): " substr(sentences[i], 1, 60) " …"
    }
    inside = 0
}

FNR == 1 { inside = 0 }
!inside && /^ *#\[error\(/ { inside = 1; line = FNR; text = ""; sub(/^ *#\[error\(/, "") }
inside == 1 && !/^ *$/ { if (!/^ *"/) { inside = 0; next } inside = 2; sub(/^ *"/, "") }
inside == 2 {
    # The literal ends at a quote that no backslash stands before.
    if (match($0, /(^|[^\\])"/)) { text = text substr($0, 1, RSTART + RLENGTH - 2); check() }
    else { sub(/\\$/, ""); sub(/^ +/, ""); text = text $0 }
}
