# Reads C files in the kernel's style, where a function's braces stand in the first column.
#
#   uses: each name of another file's function, as FILE LINE USER USED; a file's user is its name without .c or .h.
#   walk: of the functions in `roots` (FILE:FUNCTION, by blanks) and all that they reach: how many calls stay in their
#         file, go down and climb by the table of floors on file descriptor 3. A call of the same floor climbs.
function base(file) { sub(/.*\//, "", file); sub(/\.[ch]$/, "", file); return file }
# Comments and strings go.
function bare(line) {
    gsub(/"([^"\\]|\\.)*"/, "\"\"", line)
    if (comment) { if (!sub(/.*\*\//, "", line)) return ""; comment = 0 }
    gsub(/\/\*([^*]|\*[^\/])*\*\//, "", line)
    if (sub(/\/\*.*/, "", line)) comment = 1
    sub(/\/\/.*/, "", line)
    return line
}
function defined_at(file, name) { return (file, name) in own ? file : name in shared ? shared[name] : "" }
FILENAME == "/dev/fd/3" { for (i = 1; i <= NF; i++) level[$i] = FNR; next }
FNR == 1 { comment = 0; begun = inside = "" }
{
    line = bare($0)
    if (line ~ /^[A-Za-z_][^=]*[A-Za-z0-9_]\(/ && line !~ /;[ \t]*$/) {
        begun = line
        sub(/\(.*/, "", begun)
        sub(/.*[^A-Za-z0-9_]/, "", begun)
        hidden = line ~ /^static/ && FILENAME ~ /\.c$/
        next
    }
    if (line == "{" && begun != "") {
        inside = begun
        if (hidden) own[FILENAME, inside] = 1; else shared[inside] = FILENAME
        begun = ""
    }
    if (line == "}") inside = ""
    text[++n] = line; at[n] = FNR; where[n] = FILENAME; within[n] = inside
}
END {
    for (i = 1; i <= n; i++) {
        rest = text[i]
        if (rest ~ /^#include/ || rest ~ /^(extern )?[a-z].*\);$/ && within[i] == "") continue
        before = ""
        while (match(rest, /[A-Za-z_][A-Za-z0-9_]*/)) {
            before = RSTART > 1 ? substr(rest, RSTART - 1, 1) : before
            name = substr(rest, RSTART, RLENGTH)
            rest = substr(rest, RSTART + RLENGTH)
            file = before ~ /[.>]/ ? "" : defined_at(where[i], name)
            before = ""
            if (file == "" || name == within[i]) continue
            if (base(file) != base(where[i]) && mode == "uses") print where[i], at[i], base(where[i]), base(file)
            if (rest ~ /^\)?\(/ && within[i] != "") calls[where[i], within[i]] = calls[where[i], within[i]] " " file ":" name
        }
    }
    if (mode == "walk") {
        todo = split(roots, queue, " ")
        for (i = 1; i <= todo; i++) { seen[queue[i]] = 1; split(queue[i], root, ":"); if (!defined_at(root[1], root[2])) missing = queue[i] }
        for (i = 1; i <= todo; i++) {
            split(queue[i], from, ":")
            many = split(calls[from[1], from[2]], called, " ")
            for (k = 1; k <= many; k++) {
                split(called[k], to, ":")
                if (!(called[k] in seen)) { seen[called[k]] = 1; queue[++todo] = called[k] }
                if (base(to[1]) == base(from[1])) stays++
                else if (level[base(to[1])] > level[base(from[1])]) downs++
                else { climbs++; if (verbose) print from[1], from[2], "->", called[k] }
            }
        }
        if (missing != "") print "missing", missing
        else print todo + 0, stays + 0, downs + 0, climbs + 0
    }
}
