# Names each sentence of more than 25 words in Markdown: FILE:LINE: the rule, and how the sentence begins.
# Tables, code blocks and headings are left out. What stands between backquotes is one word.
# A sentence ends with a full stop, question or exclamation mark, or colon before white space.

function check(    count, words) {
    gsub(/\[|\]\([^)]*\)/, "", sentence)
    count = split(sentence, words)
    if (count > 25) print name ":" line ": a sentence of " count " words (at most 25): " substr(sentence, 2, 60) " …"
    sentence = ""
}

function word(text) {
    if (text ~ /^[-–—·=+→]+$/) return
    if (sentence == "") { name = FILENAME; line = FNR }
    sentence = sentence " " text
    if (text ~ /[.!?:][)*_"\]]*(\([^)]*\))?[)*_"]*$/ && text !~ /^(e\.g\.|i\.e\.)$/) check()
}

FNR == 1 { check(); is_code = 0 }
/^ *```/ { check(); is_code = !is_code; next }
is_code || /^ *$/ || /^ *[|#]/ || /^ *</ { check(); next }
{
    text = $0
    if (match(text, /^ *([-*]|[0-9]+\.) +/)) { check(); text = substr(text, RLENGTH + 1) }
    while (match(text, /`[^`]*`/)) text = substr(text, 1, RSTART - 1) "CODE" substr(text, RSTART + RLENGTH)
    count = split(text, parts)
    for (i = 1; i <= count; i++) word(parts[i])
}
END { check() }
