#!/usr/bin/env bash
# Train on every worker of a TPU slice and continue after preemptions until the drafter is exported.
#   NAME=my-slice ZONE=us-east5-a configs/tpu/train.sh my_run.yaml output=/mnt/my-bucket/my_run mesh.fsdp=4
# The same command runs on every worker; they find each other. A worker that is told to stop (SIGTERM) makes all of them save and stop at the
# same step, and a worker that vanishes ends the others within --timeout; either way the loop starts again where the last checkpoint is.
# A spot or preemptible slice that was taken away has to exist again first: CREATE holds the command that makes it, for example
#   CREATE="gcloud compute tpus tpu-vm create my-slice --zone=us-east5-a --accelerator-type=v5p-16 --version=v2-alpha-tpuv5 --spot && configs/tpu/setup.sh"
set -uo pipefail
: "${NAME:?the TPU VM}" "${ZONE:?its zone}"
[ $# -ge 1 ] || { echo "usage: NAME=... ZONE=... $0 CONFIG [SECTION.KEY=VALUE]..." >&2; exit 2; }
arguments=$(printf ' %q' "$@")
pause=${PAUSE:-30} quick=0

while true; do
  started=$(date +%s)
  gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="python3 -m angelspec_jax train$arguments"
  code=$?
  [ $code -eq 0 ] && exit 0
  # What fails at once, three times running, is a mistake in the command, the config or the data.
  if [ $(($(date +%s) - started)) -lt 120 ]; then quick=$((quick + 1)); else quick=0; fi
  [ $quick -lt 3 ] || { echo "the run ended with code $code within two minutes, three times running; its output says why" >&2; exit 1; }
  echo "the run ended with code $code; starting it again in $pause s" >&2
  sleep "$pause"
  state=$(gcloud compute tpus tpu-vm describe "$NAME" --zone="$ZONE" --format='value(state)' 2>/dev/null || echo MISSING)
  if [ "$state" != READY ]; then
    [ -n "${CREATE:-}" ] || { echo "$NAME is $state and CREATE does not say how to make it again" >&2; exit 1; }
    gcloud compute tpus tpu-vm delete "$NAME" --zone="$ZONE" --quiet
    until bash -c "$CREATE"; do sleep 60; done
  fi
done
