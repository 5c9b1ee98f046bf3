#!/bin/bash
# Everything about the CUDA backend that only a device can show, in at most five minutes, in one Markdown report:
#
#     make gpu-bundle           # where the packages are; then bring the tree and gpu-bundle/ to the machine with a GPU
#     bash tests/gpu/check.sh   # there: CUDA's libraries and python3 (numpy, PyTorch where it is to be compared)
#
# Without a device: "skipped: no CUDA device", exit 0. Each section has a time of its own; one that fails or hangs is
# named, and the next one runs. Exit 0 if every check passed. Environment:
#
#     OUT          folder of gpu-report.md (default out)
#     MODEL        a GGUF model to compare on, too, say models/SmolLM2-135M-Instruct.Q4_1.gguf
#     BUNDLE       default gpu-bundle
#     PYTHON       default python3
#     TMPDIR       where the model and traces of the speed section go: some 3 GB (default /tmp)
#     CHECK_FIBERS set: no device; BUILD's kvlag-fibers.so runs the kernels on the CPU, at tiny sizes: a test of this
#                  script
set -u
cd "$(dirname "$0")/../.." || exit 1
export OUT=${OUT:-out} PYTHON=${PYTHON:-python3} BUNDLE=${BUNDLE:-gpu-bundle} BUILD=${BUILD:-build/gcc-release}
export TEXT=demo/genesis.txt PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
fibers=${CHECK_FIBERS:-}
report=$OUT/gpu-report.md
TOTAL=300 # seconds

# ---- sections: each prints Markdown and exits 0 if all is well, 77 if it cannot run here -----------------------------

machine() {
    if [ -n "$fibers" ]; then
        echo "- no device: kernels run on the CPU"
        return
    fi
    local ask=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,pcie.link.gen.current
    nvidia-smi --query-gpu=$ask,pcie.link.width.current --format=csv,noheader | sed 's/^/- nvidia-smi: /'
    "$PYTHON" tests/gpu/device.py
    echo "- $(nproc) processors, $(awk '/MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)," \
        "$(awk -F': ' '/model name/ { print $2; exit }' /proc/cpuinfo)"
    echo "- $("$PYTHON" -c 'import torch; print("PyTorch", torch.__version__)' 2>/dev/null || echo 'no PyTorch')"
    missing=$(ldd "$KVLAG" "$LADDER" 2>&1 | grep 'not found')
    [ -z "$missing" ] || { echo "- FAILED, libraries: $missing" && return 1; }
}

parity() {
    local code=0 tokens=${fibers:+33}
    "$PYTHON" tests/tiny/make_gguf.py "$work/tiny-q4_1.gguf" --type q4_1 >"$work/log" || cat "$work/log"
    "$PYTHON" tests/gpu/parity.py "$tiny" "$TEXT" --tokens "${tokens:-700}" --other "$work/tiny-q4_1.gguf" || code=1
    if [ -n "${MODEL:-}" ]; then
        "$PYTHON" tests/gpu/parity.py "$MODEL" "$TEXT" --tokens "${tokens:-256}" || code=1
    else
        echo "MODEL is not given: nothing but the tiny model was compared."
    fi
    return $code
}

small_shapes="tokens=70 embd=192 heads=6 kv=2 ff=208 vocab=333 rows=20 copies=3 repeat=1"

ladder() {
    if [ -n "$fibers" ]; then
        "$LADDER" $small_shapes 2>&1
    else
        "$LADDER" $("$PYTHON" tests/gpu/device.py --peaks) 2>&1
    fi
}

speed() {
    "$PYTHON" tests/gpu/speed.py "$work" ${fibers:+--small} 2>&1
}

# compute-sanitizer TOOL over every kernel at a small odd shape, and over a trace.
sanitize() {
    local tool=$1 name=$2 code
    shift 2
    timeout -k 5 40 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 "$@" >"$work/log" 2>&1
    code=$?
    if grep -q 'Device not supported' "$work/log"; then
        echo "- $tool: this device, or the way it is shared, is not supported"
        return 77
    fi
    echo "- $tool, $name: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$work/log" | sed 's/^=* *//'), exit $code"
    [ $code -eq 0 ] || { echo '```' && grep -v '^|' "$work/log" | tail -n 25 && echo '```'; }
    return $code
}

sanitizer() {
    local code=0 tool
    if [ -n "$fibers" ] || ! command -v compute-sanitizer >/dev/null; then
        echo "no compute-sanitizer here"
        return 77
    fi
    for tool in memcheck racecheck; do
        sanitize $tool "every kernel" "$LADDER" $small_shapes || code=$?
        [ $code -ne 77 ] || return 77
        sanitize $tool "a trace" "$KVLAG" trace "$tiny" "$TEXT" -o "$work/sanitizer.h5" --force -q --backend cuda \
            --tokens 65 --attention both || code=$?
    done
    return $code
}

# ---- what they run with ----------------------------------------------------------------------------------------------

has_device() {
    [ -n "$fibers" ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU ' || "$PYTHON" tests/gpu/device.py >/dev/null 2>&1
}

# cuBLAS beside our own libraries, unless the system's loader knows it.
find_cublas() {
    local of_python folder
    ! ldconfig -p 2>/dev/null | grep -q 'libcublasLt\.so\.13' || return 0
    of_python=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)
    for folder in /usr/local/cuda*/lib64 /usr/local/cuda*/targets/*/lib "$of_python"/nvidia/*/lib; do
        [ -e "$folder/libcublasLt.so.13" ] || continue
        ln -s "$folder"/libcublas.so.13 "$folder"/libcublasLt.so.13 "$work/lib/"
        return
    done
}

# kvlag and the ladder look for libraries in lib/ beside themselves.
prepare() {
    if [ -n "$fibers" ]; then
        export KVLAG=${KVLAG:-./kvlag} LADDER=$BUILD/tests/gpu/ladder-fibers KVLAG_CUDA_PLUGIN=$BUILD/kvlag-fibers.so
        export tiny=build/tiny.gguf
        return
    fi
    if [ ! -e "$BUNDLE/bundle.tar.gz" ]; then
        echo "no $BUNDLE/: 'make gpu-bundle' makes it where kvlag's packages are" >&2
        return 1
    fi
    tar -C "$work" -xzf "$BUNDLE/bundle.tar.gz" || return 1
    find_cublas
    export KVLAG=$work/kvlag LADDER=$work/ladder KVLAG_CUDA_PLUGIN=$work/kvlag-cuda.so tiny=$work/tiny.gguf
}

write_report() {
    {
        printf '# kvlag on a GPU\n\n`tests/gpu/check.sh`, %s, commit %s, %d s.\n\n' "$(date -u +%F)" \
            "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" "$SECONDS"
        printf '| section | outcome | s |\n|---|---|---|\n'
        printf '%s\n' "${outcomes[@]}"
        cat "$work/body"
    } >"$report"
}

section() {
    local name=$1 limit=$2 start=$SECONDS code outcome
    [ "$limit" -le $((TOTAL - SECONDS)) ] || limit=$((TOTAL - SECONDS))
    printf '\n## %s\n\n' "$name" >>"$work/body"
    : >"$work/errors"
    code=124
    if [ "$limit" -gt 0 ]; then
        timeout -k 5 "$limit" bash -c "$name" >>"$work/body" 2>"$work/errors"
        code=$?
    fi
    case $code in
    0) outcome=passed ;;
    77) outcome="left out" ;;
    124 | 137) outcome="OUT OF TIME" ;;
    *) outcome=FAILED ;;
    esac
    if [ $code -ne 0 ] && [ -s "$work/errors" ]; then
        { echo && echo '```' && tail -n 20 "$work/errors" && echo '```'; } >>"$work/body"
    fi
    [ $code -eq 0 ] || [ $code -eq 77 ] || failed=1
    outcomes+=("| $name | $outcome | $((SECONDS - start)) |")
    echo "$name: $outcome, $((SECONDS - start)) s"
    write_report
}

if ! has_device; then
    echo "skipped: no CUDA device"
    exit 0
fi
work=$(mktemp -d "${TMPDIR:-/tmp}/kvlag-gpu.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
mkdir -p "$OUT" && prepare || exit 1
export work fibers small_shapes
export -f machine parity ladder speed sanitize sanitizer
failed=0 outcomes=()
section machine 20
section parity 70
section ladder 45
section speed 130
section sanitizer 170
echo "report: $report"
exit $failed
