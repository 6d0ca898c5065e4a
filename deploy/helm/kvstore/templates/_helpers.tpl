{{- define "kvstore.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvstore.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvstore.labels" -}}
{{ include "kvstore.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvstore.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvstore.account" -}}
{{ .Values.serviceAccount.name | default (include "kvstore.name" .) }}
{{- end }}

{{- define "kvstore.scheme" -}}
{{ if .Values.tls.secret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{- /* Where the pods see the authority that signed the certificates; empty: what the system trusts. */ -}}
{{- define "kvstore.ca" -}}
{{- if .Values.tls.ca }}{{ if not .Values.tls.secret }}{{ fail "tls.ca is a key of the Secret tls.secret; name that as well" }}{{ end }}/run/secrets/kvstore-tls/{{ .Values.tls.ca }}{{ end -}}
{{- end }}

{{- /* Of "64GiB" the number of GiB, rounded up; any unit that kvstore reads is not: the limit of a pod is derived from it. */ -}}
{{- define "kvstore.memoryGiB" -}}
{{- $text := .Values.memory | toString -}}
{{- if hasSuffix "TiB" $text }}{{ mul (trimSuffix "TiB" $text | int) 1024 }}{{ else if hasSuffix "GiB" $text }}{{ trimSuffix "GiB" $text | int }}{{ else }}{{ fail (printf "memory: write whole GiB or TiB, such as 64GiB, not %q" $text) }}{{ end -}}
{{- end }}

{{- /* The file that `kvstore serve --config` reads. */ -}}
{{- define "kvstore.config" -}}
{{- $ca := include "kvstore.ca" . -}}
{{- $given := dict
  "listen" (printf "0.0.0.0:%v" .Values.ports.node)
  "unix" "/run/kvstore/node.sock"
  "http" (printf "0.0.0.0:%v" .Values.ports.http)
  "memory" .Values.memory
  "token_file" "/run/secrets/kvstore/node"
  "http_admin_token_file" "/run/secrets/kvstore/admin"
  "drain_timeout" (printf "%vs" .Values.drainSeconds)
-}}
{{- if .Values.disk.hostPath }}{{ $_ := set $given "disk" (printf "file:///nvme/kv?bytes=%s" .Values.disk.size) }}{{ end -}}
{{- if .Values.remote }}{{ $_ := set $given "remote" .Values.remote }}{{ end -}}
{{- if .Values.ttl }}{{ $_ := set $given "ttl" .Values.ttl }}{{ end -}}
{{- if .Values.tls.secret }}{{ $_ := set $given "tls_cert" "/run/secrets/kvstore-tls/tls.crt" }}{{ $_ := set $given "tls_key" "/run/secrets/kvstore-tls/tls.key" }}{{ end -}}
{{- if .Values.controller.enabled }}{{ $_ := set $given "controller" (printf "%s://%s-controller.%s.svc:%v" (include "kvstore.scheme" . | lower) (include "kvstore.name" .) .Release.Namespace .Values.controller.port) }}{{ if $ca }}{{ $_ := set $given "controller_ca" $ca }}{{ end }}{{ end -}}
{{- range $name, $_ := .Values.config }}{{ if hasKey $given $name }}{{ fail (printf "config.%s is set by the chart; there is a value of its own for it" $name) }}{{ end }}{{ end -}}
{{- merge $given .Values.config | toYaml }}
{{- end }}
