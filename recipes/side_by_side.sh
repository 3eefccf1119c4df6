#!/usr/bin/env bash
# Several studies on one GPU at once, each with a log of its own:
#
#   recipes/side_by_side.sh SECONDS LOGS COMMAND [COMMAND …]
#   recipes/side_by_side.sh 1700 logs \
#       'python recipes/keywords_in_order/run_in_order.py --corpus news … --deadline $(left)' \
#       'python recipes/formality_mt/train_translator.py … && python recipes/formality_mt/run_formality.py … --deadline $(left)'
#
# A command is a line of bash, in which `left` prints how many of the SECONDS are left when it gets there. What the
# first one says is in LOGS/1.log, and so on. NVIDIA's MPS is started where it is at hand and not running yet: processes
# that take turns on a GPU wait for each other, processes that share it do not (benchmarks/LOG.md, 2026-11-18). The exit
# status is the number of commands that failed.
set -u

if [ $# -lt 3 ] || ! [[ $1 =~ ^[0-9]+$ ]]; then
    echo "usage: side_by_side.sh SECONDS LOGS COMMAND [COMMAND …]" >&2
    exit 64
fi
END=$(($(date +%s) + $1)) LOGS=$2
shift 2
left() { echo $((END - $(date +%s))); }
export END
export -f left
mkdir -p "$LOGS"

if command -v nvidia-cuda-mps-control >/dev/null && [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$LOGS
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    nvidia-cuda-mps-control -d
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi

started=()
for number in $(seq $#); do
    bash -c "${!number}" >"$LOGS/$number.log" 2>&1 &
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
exit $failed
