#!/bin/bash
# bundle.sh FROM FOLDER: pack what tests/gpu/check.sh needs on a machine that has CUDA and PyTorch but none of our
# packages: the programs, the plugin, the tiny model, and the shared libraries that kvlag loads, except those of glibc
# and gcc, which any machine with nvcc has. More than LIMIT is an error.
set -eu
from=$1 folder=$2
LIMIT=60 # MiB, with the source tree

rm -rf "$folder"
mkdir -p "$folder/pack/lib"
ldd "$from/kvlag" | awk '$2 == "=>" { print $3 }' |
    grep -vE '/(libc|libm|libdl|libpthread|librt|libresolv|libanl|libutil|libmvec|libgcc_s|libstdc\+\+)\.so' |
    xargs -I{} cp -L {} "$folder/pack/lib/"
for program in kvlag kvlag-cuda.so ladder; do
    strip --strip-debug -o "$folder/pack/$program" "$from/$program"
done
cp build/tiny.gguf "$folder/pack/"
tar -C "$folder/pack" -czf "$folder/bundle.tar.gz" .
rm -r "$folder/pack"

tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -ck | awk 'END { print $1 }')
bundle=$(du -sk "$folder" | cut -f1)
echo "$folder: $((bundle / 1024 + 1)) MiB, with the source tree $(((bundle + tree) / 1024 + 1)) of at most $LIMIT"
test $((bundle + tree)) -le $((LIMIT * 1024))
