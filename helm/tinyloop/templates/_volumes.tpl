{{/* Every path that is written is a volume, since the root is read-only; what is only read is mounted so.

    /tmp                     emptyDir
    /var/cache/tinyloop      compiled kernels: emptyDir, or a claim (kernelCache.persistent)
    /var/lib/tinyloop        names and snapshots: a claim (persistence.enabled)
    /models                  the model: a claim, an image, or an emptyDir that the init container fills
    /etc/tinyloop/tokens     the tokens file; no subPath, which would not follow a change
    /etc/tinyloop/tls        certificate and key; likewise
    /etc/tinyloop/prefixes   the prefixes file
*/}}

{{- define "tinyloop.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- if not .Values.kernelCache.persistent }}
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.kernelCache.size }}
{{- end }}
{{- with include "tinyloop.modelVolume" . }}
- name: model
  {{- . | nindent 2 }}
{{- end }}
{{- if .Values.auth.enabled }}
- name: tokens
  secret:
    secretName: {{ include "tinyloop.tokensSecret" . }}
    defaultMode: 0440
    items:
      - key: {{ ternary .Values.auth.key "tokens.toml" (not (empty .Values.auth.existingSecret)) }}
        path: tokens.toml
{{- end }}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ .Values.tls.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- if .Values.prefixes }}
- name: prefixes
  configMap:
    name: {{ include "tinyloop.fullname" . }}-prefixes
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tinyloop.modelVolume" -}}
{{- with .Values.model -}}
{{- if .existingClaim -}}
persistentVolumeClaim:
  claimName: {{ .existingClaim }}
  readOnly: true
{{- else if .image -}}
image:
  reference: {{ .image }}
  pullPolicy: {{ $.Values.image.pullPolicy }}
{{- else if .fetch.image -}}
emptyDir:
  sizeLimit: {{ .fetch.sizeLimit }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tinyloop.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/tinyloop
{{- if .Values.persistence.enabled }}
- name: state
  mountPath: /var/lib/tinyloop
{{- end }}
{{- range $name, $path := dict
    "model" (ternary "/models" "" (ne (include "tinyloop.modelVolume" .) ""))
    "prefixes" (ternary "/etc/tinyloop/prefixes" "" (gt (len .Values.prefixes) 0))
    "tls" (ternary "/etc/tinyloop/tls" "" .Values.tls.enabled)
    "tokens" (ternary "/etc/tinyloop/tokens" "" .Values.auth.enabled) }}
{{- if $path }}
- name: {{ $name }}
  mountPath: {{ $path }}
  readOnly: true
{{- end }}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tinyloop.volumeClaims" -}}
{{- if .Values.kernelCache.persistent }}
{{ include "tinyloop.volumeClaim" (dict "name" "cache" "claim" .Values.kernelCache) }}
{{- end }}
{{- if .Values.persistence.enabled }}
{{ include "tinyloop.volumeClaim" (dict "name" "state" "claim" .Values.persistence) }}
{{- end }}
{{- end -}}

{{- define "tinyloop.volumeClaim" -}}
- metadata:
    name: {{ .name }}
  spec:
    accessModes: {{ default (list "ReadWriteOnce") .claim.accessModes | toJson }}
    {{- with .claim.storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .claim.size }}
{{- end -}}
