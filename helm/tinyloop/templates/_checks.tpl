{{/* What cannot work is refused here, in one sentence that says the way out.  values.schema.json has the rest. */}}

{{- define "tinyloop.checks" -}}
{{- include "tinyloop.checkNames" . -}}
{{- include "tinyloop.checkCallers" . -}}
{{- include "tinyloop.checkAutoscaling" . -}}
{{- include "tinyloop.checkModel" . -}}
{{- include "tinyloop.checkGracePeriod" . -}}
{{- end -}}

{{- define "tinyloop.checkNames" -}}
{{- $kind := .Values.registry.kind -}}
{{- $most := ternary .Values.autoscaling.maxReplicas .Values.replicaCount .Values.autoscaling.enabled | int -}}
{{- if and (gt $most 1) (ne $kind "redis") -}}
{{- fail (printf "%d replicas given with registry.kind=%s: replicas know one another's names by Redis only; set registry.kind=redis and registry.redis.url, or one replica" $most $kind) -}}
{{- end -}}
{{- with .Values.registry.redis -}}
{{- if and (eq $kind "redis") (not .url) (not .existingSecret) -}}
{{- fail "registry.kind=redis given without an address: set registry.redis.url, or registry.redis.existingSecret for a URL with a password" -}}
{{- end -}}
{{- if and .url .existingSecret -}}
{{- fail "registry.redis.url and registry.redis.existingSecret given: leave one of them empty" -}}
{{- end -}}
{{- end -}}
{{- if and (eq $kind "sqlite") (not .Values.persistence.enabled) -}}
{{- fail "registry.kind=sqlite given without persistence: its file would end with the pod; set persistence.enabled=true" -}}
{{- end -}}
{{- if and .Values.snapshots.enabled (not .Values.persistence.enabled) -}}
{{- fail "snapshots.enabled given without persistence: they would end with the pod; set persistence.enabled=true" -}}
{{- end -}}
{{- end -}}

{{- define "tinyloop.checkCallers" -}}
{{- with .Values.tls -}}
{{- if and .enabled (not .existingSecret) -}}
{{- fail "tls.enabled given without a certificate: set tls.existingSecret to a Secret with tls.crt and tls.key" -}}
{{- end -}}
{{- if and .requireClientCertificate (not .enabled) -}}
{{- fail "tls.requireClientCertificate given without tls.enabled: client certificates are shown over TLS only" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tinyloop.checkAutoscaling" -}}
{{- $metrics := .Values.metrics -}}
{{- with .Values.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas=%d is above autoscaling.maxReplicas=%d" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- if and .enabled (not $metrics.enabled) -}}
{{- fail "autoscaling.enabled given without metrics: the length of the queue is one of them; set metrics.enabled=true" -}}
{{- end -}}
{{- if and .enabled (eq .kind "keda") (not .prometheusAddress) -}}
{{- fail "autoscaling.kind=keda given without an address: KEDA asks Prometheus for the length of the queue; set autoscaling.prometheusAddress" -}}
{{- end -}}
{{- end -}}
{{- if and (not $metrics.enabled) (or $metrics.serviceMonitor.enabled $metrics.prometheusRule.enabled) -}}
{{- fail "metrics.serviceMonitor or metrics.prometheusRule given without metrics: set metrics.enabled=true" -}}
{{- end -}}
{{- end -}}

{{- define "tinyloop.checkModel" -}}
{{- $kubernetes := .Capabilities.KubeVersion.Version -}}
{{- with .Values.model -}}
{{- $sources := compact (list .existingClaim .image .fetch.image) -}}
{{- if gt (len $sources) 1 -}}
{{- fail "more than one of model.existingClaim, model.image and model.fetch.image given: a model comes from one place" -}}
{{- end -}}
{{- if and $sources (not .path) -}}
{{- fail "model.path is empty: name the .tinyloop file in the volume that the model comes from" -}}
{{- end -}}
{{- if and .image (semverCompare "<1.31.0-0" $kubernetes) -}}
{{- fail (printf "model.image given, but Kubernetes %s does not mount images: use model.existingClaim or model.fetch" $kubernetes) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tinyloop.checkGracePeriod" -}}
{{- $least := include "tinyloop.leastGracePeriod" . | int -}}
{{- $given := .Values.terminationGracePeriodSeconds -}}
{{- if and (not (kindIs "invalid" $given)) (lt (int $given) $least) -}}
{{- fail (printf "terminationGracePeriodSeconds=%d given, but preStopSeconds, settings.drain_pause_s and settings.drain_grace_s take up to %d, and running requests would be cut off: give at least that, or leave it to the chart" (int $given) $least) -}}
{{- end -}}
{{- end -}}
