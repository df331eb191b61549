#!/usr/bin/env bash
# Prepare every worker of a TPU slice: the package with the TPU runtime, and a bucket mounted as a shared folder.
#   NAME=my-slice ZONE=us-east5-a BUCKET=my-bucket SOURCE=git+https://... configs/tpu/setup.sh
# Every worker of a run must see the same output folder; gcsfuse makes one of a Cloud Storage bucket, at /mnt/BUCKET.
set -euo pipefail
: "${NAME:?the TPU VM}" "${ZONE:?its zone}" "${BUCKET:?a Cloud Storage bucket}" "${SOURCE:?what pip installs, such as git+URL or a wheel}"

gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="
  set -eu
  python3 -m pip install --quiet 'angelspec-jax[tpu] @ $SOURCE'
  if ! command -v gcsfuse >/dev/null; then
    echo 'deb https://packages.cloud.google.com/apt gcsfuse-'\$(lsb_release -cs)' main' | sudo tee /etc/apt/sources.list.d/gcsfuse.list
    curl -fsS https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee /etc/apt/trusted.gpg.d/gcsfuse.asc >/dev/null
    sudo apt-get update -qq && sudo apt-get install -y -qq gcsfuse
  fi
  sudo mkdir -p /mnt/$BUCKET && sudo chown \"\$USER\" /mnt/$BUCKET
  mountpoint -q /mnt/$BUCKET || gcsfuse --implicit-dirs $BUCKET /mnt/$BUCKET
  python3 -m angelspec_jax doctor
"
