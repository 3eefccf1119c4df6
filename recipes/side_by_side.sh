#!/usr/bin/env bash
# Several studies on one GPU at once, each with a log of its own:
#
#   recipes/side_by_side.sh SECONDS LOGS COMMAND [COMMAND …]
#   recipes/side_by_side.sh 1700 logs \
#       'python recipes/keywords_in_order/run_in_order.py --corpus news … --deadline $(left)' \
#       'python recipes/formality_mt/train_translator.py … && python recipes/formality_mt/run_formality.py … --deadline $(left)'
#
# A command is a line of bash, in which `left` prints how many of the SECONDS are left when it gets there, at least 1.
# What the first one says is in LOGS/1.log, and so on. NVIDIA's MPS is started where it is at hand, unless
# CUDA_MPS_PIPE_DIRECTORY names one that runs: processes that take turns on a GPU wait for each other, processes that
# share it do not (benchmarks/LOG.md, 2026-11-18). The exit status is the number of commands that failed.
set -u

if [ $# -lt 3 ] || ! [[ $1 =~ ^[0-9]+$ ]]; then
    echo "usage: side_by_side.sh SECONDS LOGS COMMAND [COMMAND …]" >&2
    exit 64
fi
mkdir -p "$2" || exit 64
END=$(($(date +%s) + $1)) LOGS=$(cd "$2" && pwd)
shift 2
left() {
    local seconds=$((END - $(date +%s)))
    echo $((seconds > 1 ? seconds : 1))
}
export END
export -f left

started=() mps=
stop() {
    for each in "${started[@]}"; do kill -- "-$each" 2>/dev/null; done
    wait
    [ -z "$mps" ] || { echo quit | nvidia-cuda-mps-control && rm -rf "$mps"; }
}
trap stop EXIT
trap 'exit 130' INT TERM

if command -v nvidia-cuda-mps-control >/dev/null && [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then
    mps=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY=$mps CUDA_MPS_LOG_DIRECTORY=$LOGS
    nvidia-cuda-mps-control -d
fi

for number in $(seq $#); do
    # A process group of its own, so that what a command has started is stopped with it.
    setsid bash -c "${!number}" >"$LOGS/$number.log" 2>&1 &
    started+=($!)
done
failed=0
for number in $(seq $#); do
    wait "${started[number - 1]}" || {
        failed=$((failed + 1))
        echo "failed: ${!number}" >&2
        tail -n 3 "$LOGS/$number.log" >&2
    }
done
started=()
exit $failed
