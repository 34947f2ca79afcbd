# Reads Rust files and prints each path that starts with crate::, as FILE LINE MODULE, one a line. Of core and backend,
# which are floors themselves, it prints the folder in them. Comments and inline
# test modules are left out. `use crate::{a::X, b::Y}` counts as a and b.
FNR == 1 { stop = 0; pending = 0; depth = 0; attribute = 0 }
stop { next }
/^#\[cfg\((all\()?test/ { attribute = 1; next }
attribute { attribute = 0; if ($0 ~ /^(pub(\([a-z]+\))? )?mod [a-z_]+ \{/) { stop = 1; next } }
{
    line = $0
    sub(/\/\/.*/, "", line)
    if (depth > 0) { group(line); next }
    while (match(line, /(^|[^A-Za-z0-9_$])crate::/)) {
        line = substr(line, RSTART + RLENGTH)
        if (substr(line, 1, 1) == "{") { depth = 1; fresh = 1; group(substr(line, 2)); next }
        if (match(line, /^(core|backend)::[A-Za-z0-9_]+/) || match(line, /^[A-Za-z0-9_]+/)) {
            used = substr(line, 1, RLENGTH)
            sub(/::/, "/", used)
            print FILENAME, FNR, used
        }
    }
}
# The names at the outermost level of a group, whose brace is open.
function group(text,    i, c, name) {
    name = ""
    for (i = 1; i <= length(text) && depth > 0; i++) {
        c = substr(text, i, 1)
        if (c ~ /[A-Za-z0-9_]/) { if (fresh) name = name c; continue }
        if (name != "") { print FILENAME, FNR, name; name = ""; fresh = 0 }
        if (c == "{") depth++
        else if (c == "}") depth--
        else if (c == "," && depth == 1) fresh = 1
        else if (c != " ") fresh = 0
    }
    if (name != "") { print FILENAME, FNR, name; fresh = 0 }
}
