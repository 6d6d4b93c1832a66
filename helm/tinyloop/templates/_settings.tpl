{{/* From values to the server's settings: TINYLOOP_<FIELD>, all of them in one ConfigMap but for secrets. */}}

{{/* A value as the server reads it: no 1.6777216e+07. */}}
{{- define "tinyloop.plain" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- printf "%.0f" . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{/* What follows from other values than `settings`. */}}
{{- define "tinyloop.derivedSettings" -}}
{{- $values := .Values -}}
engine: {{ ternary "cuda" "cpu" $values.gpu.enabled }}
listen: {{ printf "%s:%d" $values.listenHost (int $values.service.port) | quote }}
health_listen: {{ printf "%s:%d" $values.listenHost (int $values.service.healthPort) | quote }}
{{- if $values.metrics.enabled }}
metrics_listen: {{ printf "%s:%d" $values.listenHost (int $values.metrics.port) | quote }}
{{- end }}
{{- with include "tinyloop.modelPath" . }}
model: {{ . | quote }}
{{- end }}
{{- if $values.auth.enabled }}
tokens_file: /etc/tinyloop/tokens/tokens.toml
{{- else if not $values.tls.requireClientCertificate }}
insecure_any_address: true
{{- end }}
{{- if $values.tls.enabled }}
tls_cert: /etc/tinyloop/tls/tls.crt
tls_key: /etc/tinyloop/tls/tls.key
{{- if $values.tls.requireClientCertificate }}
tls_client_ca: /etc/tinyloop/tls/ca.crt
{{- end }}
{{- end }}
{{- if eq $values.registry.kind "sqlite" }}
registry: sqlite:////var/lib/tinyloop/names.db
{{- else if and (eq $values.registry.kind "redis") $values.registry.redis.url }}
registry: {{ $values.registry.redis.url | quote }}
{{- end }}
{{- if $values.prefixes }}
prefixes: /etc/tinyloop/prefixes/prefixes.json
{{- end }}
{{- if $values.snapshots.enabled }}
snapshot_dir: /var/lib/tinyloop/snapshots
{{- end }}
{{- end -}}

{{- define "tinyloop.modelPath" -}}
{{- with .Values.model -}}
{{- if or .existingClaim .image .fetch.image -}}
{{- printf "/models/%s" (trimPrefix "/models/" .path | trimPrefix "/") -}}
{{- else -}}
{{- .path -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What depends on the pod, or is a secret. */}}
{{- define "tinyloop.environment" -}}
- name: TINYLOOP_REPLICA
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- with .Values.registry }}
{{- if and (eq .kind "redis") .redis.existingSecret }}
- name: TINYLOOP_REGISTRY
  valueFrom:
    secretKeyRef:
      name: {{ .redis.existingSecret }}
      key: {{ .redis.key }}
{{- end }}
{{- end }}
- name: XDG_CACHE_HOME
  value: /var/cache/tinyloop
- name: CUPY_CACHE_DIR
  value: /var/cache/tinyloop/cupy
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Seconds that a pod's way out may take: what the settings say, and a minute for the step in flight. */}}
{{- define "tinyloop.leastGracePeriod" -}}
{{- $settings := .Values.settings -}}
{{- $drain := addf (default 0 $settings.drain_pause_s) (default 0 $settings.drain_grace_s) -}}
{{- addf .Values.preStopSeconds $drain 65 | ceil | int -}}
{{- end -}}
