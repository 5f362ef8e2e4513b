# A model as an image, for the chart's model.volume, from the directory of the model:
# `docker build -t localhost/trtmesh/demo-model -f deploy/model.Dockerfile models/demo`
ARG BASE=busybox:1.37

FROM ${BASE}
# `cp` of the base copies it into a pod; as a volume of an image it is the directory `model`.
COPY . /model
