# qconvert on a CPU: the core, or with extras.
#
#   docker build -t qconvert .
#   docker build -t qconvert --build-arg EXTRAS='[fast,s3]' .
#   docker run --rm --user "$(id -u)" -v /models:/models qconvert inspect DeepSeek-V3
#
# tests/test_wheel.py runs the install line in a fresh environment. The image itself was not built.
FROM python:3.11-slim

WORKDIR /opt/qconvert
COPY pyproject.toml README.md LICENSE ./
COPY qconvert qconvert
ARG EXTRAS=
RUN python -I -m pip install --no-cache-dir ".${EXTRAS}"

# A user without a home: compiled loops, headers of object stores and the Hub's cache have a place.
ENV XDG_CACHE_HOME=/tmp/cache HF_HOME=/tmp/huggingface
WORKDIR /models
ENTRYPOINT ["qconvert"]
CMD ["--help"]
