#!/bin/bash
# Builds, tests, sanitizes and measures on one GPU in under ten minutes: `make gpu`.
#
#   bench/gpu.sh FOLDER [STAGE,STAGE]     the records and logs go to FOLDER
#
# The stages `design` (python -m bench.gpu_design) and `train` (python -m experiments gpu-train) run
# only if they are named.
#
# A stage that fails, hangs or lacks a program is reported, and the others run. Benchmarks write each
# result as they measure it, so a stage that its limit ends keeps its results. PYTHON names the
# interpreter. Exit status: 0 if no stage failed, 1 if one did, 2 without a GPU.

set -u
# The limits of the stages; the time that earlier stages leave over is added.
declare -A limits=([build]=60 [tests]=150 [sanitizer]=70 [operators]=160 [steps]=100
    [design]=330 [train]=290)
total=540
grace=15 # seconds between SIGINT, on which pytest ends its record, and SIGKILL

mkdir -p "$1/logs" && out=$(cd "$1" && pwd) || exit 2
chosen=${2:-build,tests,sanitizer,operators,steps}
cd "$(dirname "$0")/.." || exit 2
reserved=0
for name in ${chosen//,/ }; do
    [[ -v limits[$name] ]] || { echo "there is no stage $name" >&2; exit 2; }
    reserved=$((reserved + limits[$name]))
done
((reserved <= total)) || { echo "$chosen: $reserved s, of $total s at most" >&2; exit 2; }
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
cuda=${CUDA_HOME:-${CUDA_PATH:-/usr/local/cuda}}
PATH=$PATH:$cuda/bin:$cuda/compute-sanitizer
# Kernels that were compiled beforehand, without a GPU, by the same Triton.
[[ ! -d build/triton-cache ]] || export TRITON_CACHE_DIR=$PWD/build/triton-cache

# In a process of its own, since a broken driver may hang it. A cold disk takes half of the time.
timeout 90 "$python" -c 'import torch; print(torch.cuda.get_device_name(), torch.__version__)' ||
    { echo "no CUDA device: nothing to measure" >&2; exit 2; }

has() {
    command -v "$1" > /dev/null ||
        "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"
}

failed=0 summary=""
stage() { # NAME "PROGRAMS AND MODULES" COMMAND...
    local name=$1 needs=$2 need status=0 said started=$SECONDS
    shift 2
    [[ ,$chosen, == *,$name,* ]] || return
    reserved=$((reserved - limits[$name]))
    for need in $needs; do
        has "$need" || { summary+="$name: not run, $need is not installed"$'\n'; return; }
    done
    local log=$out/logs/$name.log limit=$((total - SECONDS - reserved))
    echo "$name: at most $limit s"
    # timeout leads a process group, whose rest ends with it. Jobs in the background start without
    # SIGINT.
    timeout --signal=INT --kill-after=$grace $((limit - grace)) env --default-signal=INT "$@" \
        < /dev/null > "$log" 2>&1 &
    trap "kill $!; exit 130" INT TERM
    wait $! || status=$?
    kill -KILL -- -$! 2> /dev/null
    case $status in
        0) said=passed ;;
        124 | 137) said="ended at its limit" failed=1 ;;
        *) said="failed, exit status $status" failed=1 ;;
    esac
    said="$name: $said, $((SECONDS - started)) s: $(tail -n 1 "$log")"
    summary+=$said$'\n'
    echo "$said"
    [[ $status = 0 ]] || tail -n 20 "$log" | sed 's/^/    | /'
}

pytest=("$python" -m pytest -p no:cacheprovider)
# Warnings are errors in the tests. The fallback to the reference warns, which is no error here.
tests=("${pytest[@]}" -W "ignore:tnt_kernels:RuntimeWarning" --continue-on-collection-errors)
# pytest-benchmark warns of workers, also where nothing is to be timed.
parallel=()
! has xdist || parallel=(-p no:benchmark -n "$(($(nproc) < 8 ? $(nproc) : 8))" --dist worksteal)
bench=("${pytest[@]}" -q --benchmark-only --device=cuda --precision=highest,high --seconds=0.5)

stage build "c++ setuptools scipy_openblas32" "$python" setup.py build_ext --inplace
# Verbose: what is not in the log of an ended stage had not ended. Two threads a worker's reference.
OMP_NUM_THREADS=2 stage tests "pytest hypothesis numpy" "${tests[@]}" -v --maxfail=40 \
    "${parallel[@]}" --ignore=tests/gpu/test_compile_report.py tests/gpu
# Without PyTorch's cache every tensor is an allocation with known bounds.
PYTORCH_NO_CUDA_MEMORY_CACHING=1 stage sanitizer "compute-sanitizer pytest hypothesis" \
    compute-sanitizer --error-exitcode=9 --print-limit=20 "${tests[@]}" tests/gpu/test_contract.py \
    -k "TestPublic and (layouts or failures or one_by_one)"
stage operators "pytest_benchmark typer" "${bench[@]}" --out="$out/operators.json" \
    --sets=resnet32,mnist_ae,faces_ae,gpt2_full,vgg16,square4096,vgg16_conv bench/test_operators.py
# What an option costs does not depend on the precision.
stage steps "pytest_benchmark typer" "${bench[@]}" --out="$out/steps.json" \
    --sets=mnist_ae,resnet32,faces_ae,gpt2_full -k "methods or highest" bench/test_steps.py
# A line that fails, and a method that fails, is recorded; the stage then counts as failed.
stage design "pytest_benchmark typer" "$python" -m bench.gpu_design \
    --seconds=300 --out="$out/design.json"
stage train "matplotlib scipy sklearn tqdm typer" \
    "$python" -m experiments gpu-train --device=cuda --out="$out/train.json"

printf '\n%sresults: %s\n' "$summary" "$out"
exit $failed
