#!/bin/bash
# Makes the pictures of the documents: docs/img/top-80x24.png, top-160x50.png, report.png.
#
#   scripts/lanes/pictures.sh PROGRAMS    PROGRAMS: the directory of the built programs, as target/release
#
# Eight guests of the demo are booted and merged by a daemon of their own, under names that libvirt could have given them.
# tmux is the terminal; Chromium draws what it shows, and the report. PICTURES_SECONDS: how long to merge (180).
#
# Exit: 0 the pictures are there; 1 something failed, and the place that has the logs is named.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$(realpath "${1:?the directory of the built programs}")
seconds=${PICTURES_SECONDS:-180}
cache=${PAGEONE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pageone}
dir=$(mktemp -d /tmp/pageone-pictures.XXXXXX)
tmux="tmux -L $(basename "$dir")"
children=()
finish() {
    local code=$?
    $tmux kill-server 2> /dev/null || true
    for pid in "${children[@]}"; do kill "$pid" 2> /dev/null || true; done
    wait 2> /dev/null || true
    if [ $code -eq 0 ]; then rm -rf "$dir"; else echo "pictures: failed; logs are in $dir" >&2; fi
}
trap finish EXIT
say() { echo "pictures: $*"; }

kernel=$(ls "$cache"/kernels/6.1.*/vmlinuz | head -n 1)
# The smallest: larger ones do not fit into guests of this size.
archive=$(ls -rS "$cache"/initramfs-*.cpio 2> /dev/null | head -n 1)
if [ -z "$archive" ]; then
    say 'the archive of the guests is made by the demo'
    "$bin/pageone" demo --guests 1 --memory 192 --seconds 1 > "$dir/demo.log"
    archive=$(ls -rS "$cache"/initramfs-*.cpio | head -n 1)
fi

"$bin/pageone" --dir "$dir" daemon --merge-period 2 --config /dev/null 2> "$dir/daemon.log" &
children+=($!)
sleep 2
# QEMU looks for its modules beside itself, and here it is a copy under another name.
export QEMU_MODULE_DIR=${QEMU_MODULE_DIR:-/usr/lib/x86_64-linux-gnu/qemu}
# guest NAME MIB [QEMU-OPTION...]
guest() {
    local name=$1 memory=$2
    shift 2
    cp "$(command -v qemu-system-x86_64)" "$dir/$name"
    "$bin/pageone" --dir "$dir" run --no-start -- "$dir/$name" -L /usr/share/qemu -L /usr/share/seabios -accel tcg,tb-size=16 \
        -cpu qemu64,-cx16 -m "$memory" -kernel "$kernel" -initrd "$archive" -append "console=ttyS0 quiet panic=-1 nokaslr \
no_timer_check mitigations=off rootfstype=ramfs" -nodefaults -no-user-config -no-reboot -display none \
        -chardev stdio,id=console,signal=off -serial chardev:console -monitor none "$@" < /dev/null > "$dir/$name.log" 2>&1 &
    children+=($!)
}
for name in web-1 web-2 web-3 db-1 db-2 mail build; do guest $name $((192 + 16 * ${#children[@]})); done
guest billing 224 -overcommit mem-lock=on
say "$((${#children[@]} - 1)) guests boot and are merged, for $seconds s"
"$bin/pageone" --dir "$dir" record -o "$dir/host.rec" 2> "$dir/record.log" &
recorder=$!
children+=("$recorder")

# top NAME WIDTH HEIGHT: a terminal on which it runs.
top() {
    $tmux -u -f /dev/null new-session -d -s "$1" -x "$2" -y "$3" "TERM=screen-256color '$bin/pageone' --dir '$dir' top"
}
top small 80 24
top large 160 50
sleep "$seconds"
"$bin/pageone" --dir "$dir" top --batch --count 1 > "$dir/batch.txt"
grep -q ' 8 guests' "$dir/batch.txt" || { cat "$dir/batch.txt" >&2; exit 1; }
$tmux send-keys -t large Down Enter
sleep 8
for screen in small large; do $tmux capture-pane -p -e -N -t $screen > "$dir/$screen.txt"; done

# SGR sequences to HTML.
html() {
    awk '
    function colour(n) { split("#2e3436 #cc4b4b #4e9a3a #c4a000 #4a7fd0 #8f6a9f #22a3ab #d3d7cf", dark, " ")
        split("#7c8085 #ef4f4f #8ae234 #fce94f #729fcf #ad7fa8 #34e2e2 #ffffff", bright, " ")
        return n >= 60 ? bright[n - 59] : dark[n + 1] }
    function indexed(n) { return n < 8 ? colour(n) : colour(n + 52) }
    function style(   s, f, b) { f = fg; b = bg
        if (rev) { f = bg == "" ? "#16181c" : bg; b = fg == "" ? "#d3d7cf" : fg }
        s = ""; if (f != "") s = s "color:" f ";"; if (b != "") s = s "background:" b ";"
        if (bold) s = s "font-weight:bold;"; if (dim) s = s "opacity:.6;"; if (under) s = s "text-decoration:underline;"; return s }
    function sgr(codes,   n, i, c, parts) { n = split(codes, parts, ";"); if (codes == "") { n = 1; parts[1] = 0 }
        for (i = 1; i <= n; i++) { c = parts[i] + 0
            if (c == 0) { fg = bg = ""; bold = dim = rev = under = 0 } else if (c == 1) bold = 1; else if (c == 2) dim = 1
            else if (c == 4) under = 1; else if (c == 7) rev = 1; else if (c == 22) bold = dim = 0; else if (c == 27) rev = 0
            else if (c == 38 && parts[i + 1] == 5) { fg = indexed(parts[i + 2] + 0); i += 2 }
            else if (c == 48 && parts[i + 1] == 5) { bg = indexed(parts[i + 2] + 0); i += 2 }
            else if (c == 39) fg = ""; else if (c == 49) bg = ""
            else if (c >= 30 && c <= 37) fg = colour(c - 30); else if (c >= 90 && c <= 97) fg = colour(c - 30)
            else if (c >= 40 && c <= 47) bg = colour(c - 40); else if (c >= 100 && c <= 107) bg = colour(c - 40) } }
    BEGIN { print "<!DOCTYPE html><meta charset=utf-8><style>body{margin:0;background:#16181c}pre{margin:8px;font:14px/16px \"DejaVu Sans Mono\";color:#d3d7cf}</style><pre>" }
    { line = $0; gsub(/&/, "\\&amp;", line); gsub(/</, "\\&lt;", line); gsub(/[\016\017]/, "", line); out = ""
        while (match(line, /\033\[[0-9;]*m/)) { text = substr(line, 1, RSTART - 1)
            if (text != "") out = out "<span style=\"" style() "\">" text "</span>"
            sgr(substr(line, RSTART + 2, RLENGTH - 3)); line = substr(line, RSTART + RLENGTH) }
        if (line != "") out = out "<span style=\"" style() "\">" line "</span>"; print out }
    END { print "</pre>" }' "$1"
}
# picture HTML PNG WIDTH HEIGHT
picture() {
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$dir/profile" --force-color-profile=srgb \
        --screenshot="$2" --window-size="$3,$4" "file://$1" 2> "$dir/chromium.log"
    [ -s "$2" ] || { cat "$dir/chromium.log" >&2; exit 1; }
}
mkdir -p docs/img
html "$dir/small.txt" > "$dir/small.html"
html "$dir/large.txt" > "$dir/large.html"
picture "$dir/small.html" docs/img/top-80x24.png 692 400
picture "$dir/large.html" docs/img/top-160x50.png 1366 816
kill -INT "$recorder"
wait "$recorder" || true
"$bin/pageone" report "$dir/host.rec" -o "$dir/report.html"
picture "$dir/report.html" docs/img/report.png 1000 1350
ls -l docs/img
say 'look at them: docs/img'
